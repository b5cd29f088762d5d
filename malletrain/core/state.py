"""Owns the records of jobs and nodes, and the methods that change them.

Nothing else writes a :class:`JobRecord` or a :class:`NodeRecord`. The methods preserve these
invariants: a node belongs to at most one job, and job and node agree on it; a node is idle exactly
when no job has it and it is not leaving; the counts by pool are those of the usable nodes. The
state also stores when the next plan is due. It decides nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from allocator import NodeInfo, RescaleCost, ScalingCurve
from malletrain.core.change_costs import StartCost
from malletrain.core.commands import Rescale, Start, Suspend
from malletrain.core.events import JobState, JobSubmitted, NodeJoined
from malletrain.core.goodput import BatchState
from malletrain.core.pools import Pool, PoolNode
from malletrain.core.records import JobRecord, NodeRecord
from malletrain.core.scaling_model import ScalingModel
from scavenger.horizon import GapForecast

SWEEP_END_S = 600.0
"""Time after which a sweep without unfinished jobs has ended, seconds."""


class ControllerState:
    """Jobs and nodes of one controller. Read the attributes; change them through the methods."""

    def __init__(self, release_after_s: float = 30.0, due_s: float = 0.0) -> None:
        self._release_after_s = release_after_s
        self._due_s = due_s
        self.jobs: dict[str, JobRecord] = {}
        self.unfinished: dict[str, JobRecord] = {}
        """Unfinished jobs, in order of submission."""
        self.at_work: dict[str, JobRecord] = {}
        """Jobs that have nodes, or were not in a plan since their submission."""
        self.sweeps: dict[str, int] = {}
        """Sweep → its place in the queue: the number of its first job. It is kept for
        :data:`SWEEP_END_S` after its last job has ended, for sweeps that submit one job after
        another.
        """
        self._sweeps_over: dict[str, float] = {}
        self.owners: dict[str, None] = {}
        """Users who have submitted a job or had a lease, in order."""
        self.job_classes: dict[str, None] = {}
        """Classes of nodes that jobs asked for (empty: any), in order."""
        self.admissions = 0
        """Counter of changes that affect which jobs can be admitted."""
        self.nodes: dict[str, NodeRecord] = {}
        self.idle: set[str] = set()
        """Nodes without a job that are not leaving."""
        self.usable: dict[str, PoolNode] = {}
        """Nodes that are not leaving, each in the pool of its owner."""
        self.usable_by_pool: Counter[Pool] = Counter()
        self._leaving: set[str] = set()
        """Nodes that are not usable."""
        self.forecasts: Mapping[str, GapForecast] = {}
        """Node in a gap, leased or not → forecast of its gap, of the latest poll."""
        self.prices: Mapping[str, float] = {}
        """Class of nodes → node-seconds that one second of a node counts, if not 1."""
        self.unpriced: frozenset[str] = frozenset()
        """Classes of nodes whose price is not known yet."""
        self.plans = 0
        """Number of plans made so far."""
        self.moves = 0
        """Counter of changes of the nodes of jobs."""
        self.plan_at: float | None = None
        """Time at which the next plan is due; None if none is."""
        self.leases_due = False
        """Whether leases must be reviewed."""

    def price(self, node_class: str) -> float:
        """Return the node-seconds that one second of a node of a class counts in budgets and
        shares.
        """
        return self.prices.get(node_class, 1.0)

    # --- when to plan ---

    def plan_soon(self, at: float) -> None:
        """Schedule a plan at ``at``, unless one is due earlier."""
        self.plan_at = at if self.plan_at is None else min(self.plan_at, at)

    def plan_made(self) -> None:
        """Count a plan that is about to be carried out."""
        self.plans += 1
        self.leases_due = True

    # --- nodes ---

    def node_joined(self, event: NodeJoined, now: float) -> None:
        """Add a node whose lease has started. It is idle unless it already runs a job of its
        owner.
        """
        forecast = self.forecasts.get(event.node)
        horizon_s = event.horizon_s if forecast is None else forecast.horizon_s
        info = NodeInfo(Pool(event.node_class, event.owner), horizon_s, event.group)
        due_until = now - event.leased_s + self._due_s
        ownerless = info if not event.owner else info.with_pool(Pool(event.node_class))
        node = NodeRecord(info, ownerless, due_until=due_until)
        self.nodes[event.node] = node
        self._add_owner(event.owner)
        self.usable[event.node] = info
        self.usable_by_pool[node.pool] += 1
        job = self.unfinished.get(event.job) if event.job else None
        if job is None or job.submitted.owner != event.owner:
            self._free([event.node], now)
            return
        node.job = event.job
        self.moves += 1
        job.nodes = (*job.nodes, event.node)
        # The agents received a start that the store has not recorded: carry it out again.
        job.broken |= job.state not in (JobState.RUNNING, JobState.PROFILING)
        self.at_work[job.submitted.job] = job

    def lasts_s(self, node: str) -> float | None:
        """Return the expected remaining time of a node, seconds; None without a forecast."""
        forecast = self.forecasts.get(node)
        return None if forecast is None else forecast.horizon_s

    def forecasts_updated(self, forecasts: Mapping[str, GapForecast]) -> None:
        """Replace the forecasts, and update the horizons of the leased nodes."""
        self.forecasts = forecasts
        for name in forecasts.keys() & self.nodes.keys():
            info = self.nodes[name].info.with_horizon(forecasts[name].horizon_s)
            self._set_info(name, info)

    def node_leaving(self, name: str, gone_at: float) -> bool:
        """Exclude a node from plans, because it is taken at ``gone_at``. Return whether a job has
        it.
        """
        node = self.nodes[name]
        self._unusable(name, node)
        self._leaving.add(name)
        node.gone_at = gone_at
        return node.job is not None

    def node_gone(self, name: str, *, breaks: bool = True) -> JobRecord | None:
        """Remove a node. Return the job that had it, or None. ``breaks``: the job's workers must
        be restarted.
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
        """Keep an idle node that is still needed until the next review at ``until``."""
        self.nodes[name].review_at = until

    def deadline(self, names: Collection[str], now: float) -> float | None:
        """Return the seconds until the first of these nodes is taken; None if none is leaving."""
        if self.none_leaves(names):
            return None
        ends = [self.nodes[n].gone_at for n in names]
        remaining_times = [end - now for end in ends if end is not None]
        return max(0.0, min(remaining_times)) if remaining_times else None

    def none_leaves(self, names: Iterable[str]) -> bool:
        """Return whether none of these present nodes is leaving."""
        return not self._leaving or self._leaving.isdisjoint(names)

    def nodes_busy(self, job: JobRecord, busy: Collection[str]) -> None:
        """Note on which of its nodes the job does work that would be lost with the node."""
        for name in job.nodes:
            self._set_work(name, name in busy, self.nodes[name].info.reread_s)

    def data_cached(self, job: JobRecord, reread_s: Mapping[str, float]) -> None:
        """Note the time in which the job would read training data again without each of its nodes,
        seconds.
        """
        for name in job.nodes:
            self._set_work(name, self.nodes[name].info.busy, reread_s.get(name, 0.0))

    def _set_work(self, name: str, busy: bool, reread_s: float) -> None:
        """Note what a job would lose with a node."""
        info = self.nodes[name].info
        if (info.busy, info.reread_s) != (busy, reread_s):
            self._set_info(name, replace(info, busy=busy, reread_s=reread_s))

    def _set_info(self, name: str, info: PoolNode) -> None:
        """Replace the properties of a node; its pool does not change."""
        node = self.nodes[name]
        node.info = info
        node.ownerless_info = info.with_pool(node.ownerless_info.pool) if node.owner else info
        if name in self.usable:
            self.usable[name] = info

    def _free(self, names: Iterable[str], now: float) -> None:
        for name in names:
            node = self.nodes[name]
            if node.info.busy or node.info.reread_s:
                self._set_work(name, False, 0.0)
            node.job, node.review_at = None, now + self._release_after_s
            if node.gone_at is None:
                self.idle.add(name)

    # --- submission and end of jobs ---

    def submit(self, event: JobSubmitted) -> JobRecord:
        """Add a new job.

        Raises:
            ValueError: a job of this name was submitted before.
        """
        if event.job in self.jobs:
            raise ValueError(f"Job {event.job} was submitted before.")
        # A profile ends with the daemon that started it. It continues from the stored measurements.
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
            last_failure_at=event.last_failure_at,
            curve=event.curve,
            seeks_layout=event.seeks_layout,
        )
        self.jobs[event.job] = job
        self._sweeps_over.pop(event.sweep, None)
        if not state.ended:
            self.unfinished[event.job] = self.at_work[event.job] = job
            self._add_owner(event.owner)
            self.job_classes[event.node_class] = None
            self.admissions += 1
        return job

    def _add_owner(self, owner: str) -> None:
        """Add an owner, if it is new."""
        if owner not in self.owners:
            self.owners[owner] = None
            self.admissions += 1

    def end(self, name: str, state: JobState, now: float) -> None:
        """End the job in ``state`` and free its nodes."""
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
        for over in [s for s, at in self._sweeps_over.items() if now - at >= SWEEP_END_S]:
            del self._sweeps_over[over]
            self.sweeps.pop(over, None)

    def limit(self, job: JobRecord, min_nodes: int, max_nodes: int) -> None:
        """Change the node limits of the job. The next plan takes the nodes beyond them."""
        job.submitted = replace(job.submitted, min_nodes=min_nodes, max_nodes=max_nodes)
        self.admissions += 1

    # --- jobs and their nodes ---

    def assign(
        self, nodes: Mapping[str, tuple[str, ...]], now: float
    ) -> list[Start | Rescale | Suspend]:
        """Give each of these jobs exactly these nodes; a job without nodes is suspended. All
        changes take effect at one instant, so a node can go from one job to another.

        Return the commands that follow, in the order of ``nodes``.

        Raises:
            ValueError: a node does not exist, is leaving, or would belong to two jobs.
        """
        commands: list[Start | Rescale | Suspend] = []
        added: dict[str, list[str]] = {}
        for name, new in nodes.items():
            job = self.jobs[name]
            before = set(job.nodes)
            added[name] = [n for n in new if n not in before]
            within = self.deadline(job.nodes, now)
            job.forced = bool(job.nodes) and (job.broken or within is not None)
            self._free(before.difference(new), now)
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

    def change_layout(self, job: JobRecord, now: float) -> list[Start | Rescale | Suspend]:
        """Restart the workers of the job on its nodes, in another layout. It counts as no rescale:
        a plan may move the job at once. Return the commands that follow.
        """
        commands = self.assign({job.submitted.job: job.nodes}, now)
        job.forced = True
        return [replace(c, new_layout=True) if isinstance(c, Rescale) else c for c in commands]

    def layout_found(self, job: JobRecord) -> None:
        """Note that the layout of the job's nodes is no longer being looked for."""
        job.seeks_layout = False

    def unplanned(self, name: str) -> None:
        """Note that a job that has never run got no nodes from a plan."""
        self.at_work.pop(name, None)

    def rescaled(self, job: JobRecord, now: float) -> bool:
        """Note that the job processes samples at its newest scale. Return whether it was
        rescaling.
        """
        if not job.rescaling:
            return False
        job.rescaling = False
        if not job.forced:
            job.rescaled_at = now
        return True

    def workers_failed(self, job: JobRecord, now: float, window_s: float, *, counts: bool) -> None:
        """Record a failure of the job's workers. If it ``counts``, it uses up a try. The count
        restarts if the previous failure is longer than ``window_s`` ago.
        """
        if job.last_failure_at is not None and now - job.last_failure_at > window_s:
            job.tries = 0
        job.last_failure_at = now
        job.tries += counts

    def break_round(self, job: JobRecord, now: float) -> None:
        """Restart the workers of the job, if it has nodes, with the next plan."""
        if job.nodes:
            job.broken = True
            self.plan_soon(now)

    # --- waiting ---

    def waits(self, job: JobRecord, now: float) -> None:
        """Note that the job is admitted. Without nodes it waits from now on."""
        if job.idle_since is None:
            job.idle_since = now

    def served_beside(self, job: JobRecord, now: float) -> None:
        """Restart the job's waiting time, because another job of its sweep has nodes."""
        job.idle_since, job.starving, job.sweep_served = now, False, True

    def starves(self, job: JobRecord, now: float) -> None:
        """Mark the job as starving, because it has waited too long."""
        job.starving = self.leases_due = True
        self.plan_soon(now)

    def guarantee(self, job: JobRecord, until: float) -> None:
        """Guarantee the minimum of a job that starved until ``until``; 0 for no guarantee."""
        job.starving, job.guaranteed_until = False, until

    # --- goals ---

    def goals_say(self, job: JobRecord, *, halted: bool, pressing: bool) -> None:
        """Set whether the job's budget is spent (``halted``) and whether its deadline is
        ``pressing``.
        """
        self.admissions += (job.halted, job.pressing) != (halted, pressing)
        job.halted, job.pressing = halted, pressing

    # --- profiles ---

    def profile_begins(self, job: JobRecord) -> None:
        """Let the profile decide the job's size from now on."""
        job.state = JobState.PROFILING

    def profile_ends(self, job: JobRecord) -> None:
        """Let plans decide the job's size again."""
        if job.state is JobState.PROFILING:
            job.state = JobState.RUNNING

    def profile_done(self, job: JobRecord) -> None:
        """Like :meth:`profile_ends`. The job is at its smallest size, so the next plan may rescale
        it at once.
        """
        self.profile_ends(job)
        job.rescaled_at = -math.inf

    def interrupted(self, job: JobRecord, now: float) -> None:
        """Note that the job gives nodes to a profile."""
        job.interrupted_at = now

    def forgive(self, job: JobRecord) -> None:
        """Reset the tries of a job whose script has run: its earlier failures came from the
        size.
        """
        job.tries = 0

    def learn(self, job: JobRecord, scaling: ScalingModel) -> None:
        """Store the scaling model of a job."""
        if scaling.curve.unusable != job.scaling.curve.unusable:
            self.admissions += 1  # its minimum number of nodes may have changed
        job.scaling = scaling

    def weigh(self, job: JobRecord, weight: float) -> None:
        """Change the weight of a job."""
        job.submitted = replace(job.submitted, weight=weight)

    def bid_with(
        self,
        job: JobRecord,
        curve: ScalingCurve | None,
        cost: RescaleCost | None,
        goodput: ScalingCurve | None = None,
    ) -> None:
        """Set the curve and the rescale cost of the job's bids, and the goodput that they value
        instead of the curve, if any.
        """
        job.curve, job.cost, job.goodput = curve, cost, goodput

    def batch_is(self, job: JobRecord, batch: BatchState) -> None:
        """Store what the job's script reports of its global batch."""
        job.batch = batch

    def advise(self, job: JobRecord, size: int) -> None:
        """Store the global batch that is advised to the job, samples."""
        job.advised_batch = size

    def value_nodes(
        self,
        job: JobRecord,
        curve: ScalingCurve,
        cost: RescaleCost | None,
        *,
        returns_useless: bool,
    ) -> None:
        """Set the values that a service or a farm states for its numbers of nodes. While all are 0
        it gets no nodes and does not wait for any.
        """
        self.bid_with(job, curve, cost)
        worthless = not curve.useful
        job.useful = curve.useful if returns_useless and not worthless else None
        if worthless != job.worthless:
            job.worthless = worthless
            job.idle_since, job.starving = None, False
            self.admissions += 1

    def start_costs(self, job: JobRecord, start: StartCost) -> None:
        """Set the expected time until a process of the service is ready."""
        job.start = start
