"""The owner of the core's jobs and nodes: the records and the methods that change them.

Nothing else writes a :class:`JobRecord` or a :class:`NodeRecord`. The methods preserve these
invariants: a node belongs to at most one job, and job and node agree on it; a node is idle exactly
when no job has it and it is not leaving; the counts by pool are those of the usable nodes. The
state also notes when the next plan is due. It decides nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from allocator import Cohort, NodeInfo, RescaleCost, ScalingCurve
from malletrain.core.commands import Rescale, Start, Suspend
from malletrain.core.events import JobState, JobSubmitted, NodeJoined
from malletrain.core.records import JobRecord, NodeRecord
from malletrain.core.scaling_model import ScalingModel

SWEEP_KEPT_S = 600.0
"""A sweep of which no job was there for so long has ended."""


class ControllerState:
    """Jobs and nodes of one controller. Read the attributes, change them by the verbs."""

    def __init__(self, release_after_s: float = 30.0, due_s: float = 0.0) -> None:
        self._release_after_s = release_after_s
        self._due_s = due_s
        self.jobs: dict[str, JobRecord] = {}
        self.unfinished: dict[str, JobRecord] = {}
        """Those that have not ended, in order of submission."""
        self.at_work: dict[str, JobRecord] = {}
        """Those that have nodes, or have not been in a plan since they were submitted."""
        self.sweeps: dict[str, int] = {}
        """The place in the queue of each sweep: the number of its first job. It is kept for
        :data:`SWEEP_KEPT_S` after the last one has ended, for those that begin one after another.
        """
        self._sweeps_over: dict[str, float] = {}
        self.owners: dict[str, None] = {}
        """Who has submitted a job, or had a lease, in order."""
        self.admissions = 0
        """Counts the changes of who could be admitted at all."""
        self.nodes: dict[str, NodeRecord] = {}
        self.idle: set[str] = set()
        """Nodes without a job that are not leaving."""
        self.usable: dict[str, NodeInfo] = {}
        """Nodes that are not leaving, with their pool as their class."""
        self.usable_by_pool: Counter[str] = Counter()
        self._leaving: set[str] = set()
        """Nodes that are not usable."""
        self._foretold: Mapping[str, tuple[float, Cohort]] = {}
        self.plans = 0
        """How many plans were made."""
        self.moves = 0
        """Counts the changes of what nodes jobs have."""
        self.plan_at: float | None = None
        """When the next plan is due."""
        self.leases_due = False
        """Whether something happened that the leases follow from."""

    # --- when to plan ---

    def plan_soon(self, at: float) -> None:
        """A plan is due at ``at``, if none is before."""
        self.plan_at = at if self.plan_at is None else min(self.plan_at, at)

    def plan_made(self) -> None:
        """A plan is being carried out."""
        self.plans += 1
        self.leases_due = True

    # --- nodes ---

    def node_joined(self, event: NodeJoined, now: float) -> None:
        """A lease is up. The node is idle, unless it runs a job of its owner already."""
        horizon_s, cohort = self._foretold.get(event.node, (event.horizon_s, None))
        node = NodeRecord(
            NodeInfo(event.node_class, horizon_s, event.group, cohort),
            event.owner,
            due_until=now - event.leased_s + self._due_s,
        )
        self.nodes[event.node] = node
        self._add_owner(event.owner)
        info = (
            node.info if node.pool == event.node_class else replace(node.info, node_class=node.pool)
        )
        self.usable[event.node] = info
        self.usable_by_pool[node.pool] += 1
        job = self.unfinished.get(event.job) if event.job else None
        if job is None or job.submitted.owner != event.owner:
            self._free([event.node], now)
            return
        node.job = event.job
        self.moves += 1
        job.nodes = (*job.nodes, event.node)
        # The store knows nothing of a start that the agents have heard of: carry it out again.
        job.broken |= job.state not in (JobState.RUNNING, JobState.PROFILING)
        self.at_work[job.submitted.job] = job

    def lasts_s(self, node: str) -> float | None:
        """How long a leased node is expected to last still, where that is foretold at every
        poll.
        """
        record = self.nodes.get(node)
        return record.info.horizon_s if record is not None and record.info.cohort else None

    def foretold(self, nodes: Mapping[str, tuple[float, Cohort]]) -> None:
        """How long nodes are expected to last still; those that are not ours may be among them."""
        self._foretold = nodes
        for name in nodes.keys() & self.nodes.keys():
            node, (horizon_s, cohort) = self.nodes[name], nodes[name]
            node.info = node.info.with_forecast(horizon_s, cohort)
            if (info := self.usable.get(name)) is not None:
                self.usable[name] = info.with_forecast(horizon_s, cohort)

    def node_leaving(self, name: str, gone_at: float) -> bool:
        """The node is taken at ``gone_at``: nothing new is planned on it. Returns whether a job has
        it.
        """
        node = self.nodes[name]
        self._unusable(name, node)
        self._leaving.add(name)
        node.gone_at = gone_at
        return node.job is not None

    def node_gone(self, name: str, *, breaks: bool = True) -> JobRecord | None:
        """The node is ours no more. Returns the job that had it; ``breaks``: its workers must be
        started again.
        """
        node = self.nodes.pop(name, None)
        if node is None:
            return None
        self._unusable(name, node)
        self._leaving.discard(name)
        if node.job is None:
            return None
        job = self.jobs[node.job]
        self.moves += 1
        job.nodes = tuple(n for n in job.nodes if n != name)
        job.broken |= breaks
        return job

    def _unusable(self, name: str, node: NodeRecord) -> None:
        self.usable_by_pool[node.pool] -= node.gone_at is None
        self.usable.pop(name, None)
        self.idle.discard(name)

    def keep_idle(self, name: str, until: float) -> None:
        """The idle node is still of use: ask again at ``until``."""
        self.nodes[name].review_at = until

    def deadline(self, names: Collection[str], now: float) -> float | None:
        """Seconds until the first of these nodes is taken away; None when none is."""
        if self.none_leaves(names):
            return None
        ends = [self.nodes[n].gone_at for n in names]
        times = [end - now for end in ends if end is not None]
        return max(0.0, min(times)) if times else None

    def none_leaves(self, names: Iterable[str]) -> bool:
        """Whether none of these nodes, which are there, is leaving."""
        return not self._leaving or self._leaving.isdisjoint(names)

    def _free(self, names: Iterable[str], now: float) -> None:
        for name in names:
            node = self.nodes[name]
            node.job, node.review_at = None, now + self._release_after_s
            if node.gone_at is None:
                self.idle.add(name)

    # --- jobs come and go ---

    def submit(self, event: JobSubmitted) -> JobRecord:
        """A new job. Raises ValueError when there was one of that name."""
        if event.job in self.jobs:
            raise ValueError(f"Job {event.job} was submitted before.")
        # A profile does not outlive the daemon that made it; it is taken up again from what is
        # stored.
        state = JobState.RUNNING if event.state is JobState.PROFILING else event.state
        order = len(self.jobs)
        job = JobRecord(
            event,
            order,
            self.sweeps.setdefault(event.sweep, order)
            if event.sweep and not state.ended
            else order,
            state,
            tries=event.tries,
            last_broke=event.last_broke,
            curve=event.curve,
        )
        self.jobs[event.job] = job
        self._sweeps_over.pop(event.sweep, None)
        if not state.ended:
            self.unfinished[event.job] = self.at_work[event.job] = job
            self._add_owner(event.owner)
            self.admissions += 1
        return job

    def _add_owner(self, owner: str) -> None:
        """There is this owner."""
        if owner not in self.owners:
            self.owners[owner] = None
            self.admissions += 1

    def end(self, name: str, state: JobState, now: float) -> None:
        """The job ends in ``state``; its nodes are free."""
        job = self.unfinished.pop(name)
        self.at_work.pop(name, None)
        self.admissions += 1
        self.moves += 1
        self._free(job.nodes, now)
        job.nodes, job.state = (), state
        job.rescaling = job.broken = job.starving = False
        self._forget_sweeps(job.submitted.sweep, now)

    def _forget_sweeps(self, sweep: str, now: float) -> None:
        if sweep and all(j.submitted.sweep != sweep for j in self.unfinished.values()):
            self._sweeps_over[sweep] = now
        for over in [s for s, at in self._sweeps_over.items() if now - at >= SWEEP_KEPT_S]:
            del self._sweeps_over[over]
            self.sweeps.pop(over, None)

    def limit(self, job: JobRecord, min_nodes: int, max_nodes: int) -> None:
        """The job gets other limits of its scale. What it has beyond them the next plan takes."""
        job.submitted = replace(job.submitted, min_nodes=min_nodes, max_nodes=max_nodes)
        self.admissions += 1

    # --- jobs and their nodes ---

    def assign(
        self, nodes: Mapping[str, tuple[str, ...]], now: float
    ) -> list[Start | Rescale | Suspend]:
        """Give each of these jobs exactly these nodes, at one instant; none: suspend it. What a job
        leaves may be another's at once.

        Returns what is to be done, in the given order. Raises ValueError when a node is not there,
        is leaving, or would belong to two jobs.
        """
        commands: list[Start | Rescale | Suspend] = []
        added: dict[str, set[str]] = {}
        for name, new in nodes.items():
            job = self.jobs[name]
            added[name] = set(new).difference(job.nodes)
            within = self.deadline(job.nodes, now)
            job.forced = bool(job.nodes) and (job.broken or within is not None)
            self._free(set(job.nodes).difference(new), now)
            if not new:
                commands.append(Suspend(name, within))
                job.turn_left_s = max(0.0, job.guaranteed_until - now)
                job.idle_since, job.guaranteed_until = now, 0.0
                job.state = JobState.SUSPENDED
            else:
                commands.append(Rescale(name, new, within) if job.nodes else Start(name, new))
                if job.state is not JobState.PROFILING:
                    job.state = JobState.RUNNING
                job.planned = self.plans
            job.nodes, job.rescaling, job.broken = new, bool(new), False
        for name, new in nodes.items():
            unfit = [] if self.none_leaves(new) else [n for n in new if n in self._leaving]
            unfit += [n for n in added[name] if n not in self.usable]
            unfit = unfit or [n for n in added[name] if self.nodes[n].job is not None]
            if unfit:
                raise ValueError(f"Node {unfit[0]} cannot be given to job {name}.")
            for node in added[name]:
                self.nodes[node].job = name
                self.idle.discard(node)
            if new:
                self.jobs[name].starving = False
                self.at_work[name] = self.jobs[name]
            else:
                self.at_work.pop(name, None)
        self.leases_due = True
        self.moves += 1
        return commands

    def unplanned(self, name: str) -> None:
        """The job, which never ran, got no nodes from a plan."""
        self.at_work.pop(name, None)

    def rescaled(self, job: JobRecord, now: float) -> bool:
        """The job processes samples at its newest scale. Returns whether that is news."""
        if not job.rescaling:
            return False
        job.rescaling = False
        if not job.forced:
            job.rescaled_at = now
        return True

    def workers_failed(self, job: JobRecord, now: float, window_s: float, *, counts: bool) -> None:
        """The job's workers failed by themselves: one try more where it ``counts``; tries longer
        than ``window_s`` ago are forgotten.
        """
        if job.last_broke is not None and now - job.last_broke > window_s:
            job.tries = 0
        job.last_broke = now
        job.tries += counts

    def break_round(self, job: JobRecord, now: float) -> None:
        """The job's workers are to be started again, where it has any."""
        if job.nodes:
            job.broken = True
            self.plan_soon(now)

    # --- waiting ---

    def waits(self, job: JobRecord, now: float) -> None:
        """The job has a place; without nodes it waits since now."""
        if job.idle_since is None:
            job.idle_since = now

    def served_beside(self, job: JobRecord, now: float) -> None:
        """Another job of its sweep has nodes, so that the sweep does not wait."""
        job.idle_since, job.starving, job.sweep_served = now, False, True

    def starves(self, job: JobRecord, now: float) -> None:
        """The job has waited for too long."""
        job.starving = self.leases_due = True
        self.plan_soon(now)

    def guarantee(self, job: JobRecord, until: float) -> None:
        """The job, which starved, has nodes; it keeps its minimum until then (0: no guarantee)."""
        job.starving, job.guaranteed_until = False, until

    # --- goals ---

    def goals_say(self, job: JobRecord, *, halted: bool, pressing: bool) -> None:
        """Whether the job's budget is spent, and whether its deadline presses."""
        self.admissions += (job.halted, job.pressing) != (halted, pressing)
        job.halted, job.pressing = halted, pressing

    # --- profiles ---

    def profile_begins(self, job: JobRecord) -> None:
        """The job's size is its profile's decision from now on."""
        job.state = JobState.PROFILING

    def profile_ends(self, job: JobRecord) -> None:
        """The job's size is the plan's decision again."""
        if job.state is JobState.PROFILING:
            job.state = JobState.RUNNING

    def profile_done(self, job: JobRecord) -> None:
        """As :meth:`profile_ends`; it stands at its smallest size, so the plan may move it at
        once.
        """
        self.profile_ends(job)
        job.rescaled_at = -math.inf

    def interrupted(self, job: JobRecord, now: float) -> None:
        """The job gives nodes to a profile."""
        job.interrupted_at = now

    def forgive(self, job: JobRecord) -> None:
        """The job's script is known to run: what failed before was its size."""
        job.tries = 0

    def learn(self, job: JobRecord, scaling: ScalingModel) -> None:
        """What is known of the job's scaling."""
        if scaling.curve.unusable != job.scaling.curve.unusable:
            self.admissions += 1  # it may need more nodes than before to run at all
        job.scaling = scaling

    def weigh(self, job: JobRecord, weight: float) -> None:
        """How much the job counts beside the others from now on."""
        job.submitted = replace(job.submitted, weight=weight)

    def bid_with(
        self, job: JobRecord, curve: ScalingCurve | None, cost: RescaleCost | None
    ) -> None:
        """What the job's bids are made from."""
        job.curve, job.cost = curve, cost
