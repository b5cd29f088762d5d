"""The decision core: a plain state machine, ``handle(event, now) -> [command]``. No I/O, no clock,
no threads.

Decides when to plan (near-simultaneous node events are one plan), what follows from a plan, how
many leases to take and which to give back, when a job has failed for good. It does not decide how
many nodes a job gets (:mod:`malletrain.core.planning`, :mod:`allocator`) nor how a rescale is
carried out (:mod:`malletrain.rounds`). The daemon and the simulator are its two shells.

Invariants, tested with random event sequences: a node belongs to at most one job; no job has more
nodes than its maximum; a job whose nodes fall under its minimum is suspended by the next plan and
keeps its place, it never fails for that; a node that is leaving or gone is never in a new plan; a
job only has nodes of its owner's leases; jobs are admitted in order of submission, those of several
owners turn by turn, those left out that could not run on the nodes there are; an admitted job
without nodes gets its minimum in turn.

Where a daemon serves several owners (:mod:`malletrain.core.pools`) it plans twice. How many nodes
each owner's jobs should have follows from a plan in which every node is anybody's; it decides as
whom leases are taken, and which are recalled for another owner. What runs now follows from a plan
in which each job can have its owner's nodes only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from allocator import NodeInfo
from malletrain.core.events import (
    Command,
    CurveLearned,
    Event,
    GapsSeen,
    JobCancelled,
    JobCompleted,
    JobState,
    JobSubmitted,
    LeaseNotTaken,
    NodeJoined,
    NodeLeaving,
    NodeLost,
    NodeRejected,
    PriorSuggested,
    Progressed,
    ReleaseLeases,
    Rescale,
    RescaleCosted,
    RescaleFinished,
    RoundFormed,
    RoundInterrupted,
    Start,
    Stop,
    Suspend,
    Tick,
    WorkersFailed,
)
from malletrain.core.gaps import Gaps
from malletrain.core.lease_planner import LeasePlanner
from malletrain.core.planning import Candidate, Plan, Planner, make_plan, turns
from malletrain.core.profile_runner import ProfileRunner
from malletrain.core.queueing import AdmissionQueue
from malletrain.core.state import ControllerSettings, JobRecord, NodeRecord

__all__ = ["Controller", "ControllerSettings", "JobRecord", "NodeRecord"]


class Controller:
    """The state machine. Every public method but :meth:`handle` and :meth:`hold` only reads."""

    def __init__(
        self, settings: ControllerSettings | None = None, planner: Planner = make_plan
    ) -> None:
        self.settings = settings or ControllerSettings()
        self._planner = planner
        self.jobs: dict[str, JobRecord] = {}
        self.nodes: dict[str, NodeRecord] = {}
        self.last_plan: Plan | None = None
        self.plans = 0
        self._unfinished: dict[str, JobRecord] = {}
        self._at_work: dict[str, JobRecord] = {}
        self._gaps = Gaps(
            self.settings.min_horizon_s, self.settings.lease_wait_s, self.settings.unfit_s
        )
        self._idle: set[str] = set()
        self._usable: dict[str, NodeInfo] = {}
        self._usable_by_pool: Counter[str] = Counter()
        self._plan_at: float | None = None
        self._leases_due = False
        self._held_until = 0.0
        self._line = AdmissionQueue(self)
        self._lease_planner = LeasePlanner(self)
        self._profile_runner = ProfileRunner(self)
        self._table: dict[type, Callable[[Any, float], Iterable[Command]]] = {
            NodeJoined: self._node_joined,
            NodeLeaving: self._node_leaving,
            NodeLost: self._node_lost,
            NodeRejected: self._node_unfit,
            GapsSeen: self._gaps_seen,
            LeaseNotTaken: self._lease_not_taken,
            JobSubmitted: self._job_submitted,
            JobCompleted: lambda event, now: self._end(event.job, JobState.COMPLETED, "", now),
            WorkersFailed: self._job_broke,
            RoundInterrupted: self._round_interrupted,
            JobCancelled: lambda event, now: self._end(
                event.job, JobState.CANCELLED, "cancelled by its owner", now
            ),
            CurveLearned: self._curve_learned,
            RescaleFinished: self._rescale_finished,
            Progressed: self._profile_runner.progressed,
            RescaleCosted: self._profile_runner.costed,
            RoundFormed: self._profile_runner.formed,
            PriorSuggested: self._profile_runner.believed,
            Tick: lambda event, now: (),
        }

    # --- the two doors ---

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event at time ``now`` (never before the last one) and return what is to be done,
        in order.

        Raises KeyError for an event about a job that was never submitted; events about unknown
        nodes are ignored (they may be late).
        """
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[Event], now: float) -> list[Command]:
        """Take events of one instant; as :meth:`handle`, with one look at what follows from
        them.
        """
        commands = [command for event in events for command in self._table[type(event)](event, now)]
        self._line.notice(now)
        if now < self._held_until:
            return commands
        if self._plan_at is not None and now >= self._plan_at:
            commands += self._plan(now)
        elif (due := self._profile_runner.next_wakeup()) is not None and now >= due:
            commands += self._review_profiles(now)
        return commands + self._lease_planner.review(now)

    def hold(self, until: float) -> None:
        """Plan nothing before ``until``: after a restart, leases and jobs come back one by one."""
        self._held_until = until
        self._plan_soon(until)

    def next_wakeup(self) -> float | None:
        """When a Tick is due although nothing happens, or ``None``."""
        due = (
            [self._plan_at]
            if self._plan_at is not None
            else [self.nodes[name].review_at for name in self._idle]
        )
        if (profile := self._profile_runner.next_wakeup()) is not None:
            due.append(profile)
        times = [max(at, self._held_until) for at in due]
        times += self._line.wakeups()
        return min(times) if times and min(times) < math.inf else None

    def held_off(self, owner: str, now: float) -> bool:
        """Whether no leases are taken as ``owner`` for a while, because they came to nothing."""
        return self._gaps.held_off(owner, now)

    # --- nodes ---

    def _node_joined(self, event: NodeJoined, now: float) -> Iterable[Command]:
        self._forget(event.node, now)
        self._gaps.joined(event.node, event.owner)
        node = NodeRecord(NodeInfo(event.node_class, event.horizon_s, event.group), event.owner)
        self.nodes[event.node] = node
        self._usable[event.node] = (
            replace(node.info, node_class=node.pool) if event.owner else node.info
        )
        self._usable_by_pool[node.pool] += 1
        job = self._unfinished.get(event.job) if event.job else None
        if job is None or job.submitted.owner != event.owner:
            self._free([event.node], now)
        else:
            node.job = event.job
            job.nodes = (*job.nodes, event.node)
            # The store knows nothing of a start that the agents have heard of: carry it out again.
            job.broken |= job.state not in (JobState.RUNNING, JobState.PROFILING)
        self._plan_soon(now + self.settings.settle_s)
        return ()

    def _node_leaving(self, event: NodeLeaving, now: float) -> Iterable[Command]:
        node = self.nodes.get(event.node)
        if node is None:
            return ()
        self._usable_by_pool[node.pool] -= node.gone_at is None
        self._usable.pop(event.node, None)
        node.gone_at = now + event.in_s
        self._idle.discard(event.node)
        if node.job:
            self._plan_soon(
                now + min(self.settings.settle_s, self.settings.notice_settle_s, event.in_s / 4)
            )
        return ()

    def _node_lost(self, event: NodeLost, now: float) -> Iterable[Command]:
        self._gaps.over(event.node)
        self._forget(event.node, now)
        return ()

    def _node_unfit(self, event: NodeRejected, now: float) -> Iterable[Command]:
        node = self.nodes.get(event.node)
        if node is None:
            return ()
        broken = node.job is not None and self.jobs[node.job].broken
        self._forget(event.node, now)
        if node.job:
            self.jobs[node.job].broken = broken  # its rounds go on without the node
        self._gaps.unfit(event.node, node.owner, now)
        return [ReleaseLeases((event.node,))]

    def _forget(self, name: str, now: float) -> None:
        """The node is ours no more; the job that had it is broken."""
        node = self.nodes.pop(name, None)
        if node is None:
            return
        self._idle.discard(name)
        self._usable_by_pool[node.pool] -= node.gone_at is None
        self._usable.pop(name, None)
        if node.job:
            job = self.jobs[node.job]
            job.nodes = tuple(n for n in job.nodes if n != name)
            job.broken = True
            self._plan_soon(now + self.settings.settle_s)

    def _gaps_seen(self, event: GapsSeen, now: float) -> Iterable[Command]:
        self._gaps.seen(event.gaps, now)
        self._leases_due = True
        return ()

    def _lease_not_taken(self, event: LeaseNotTaken, now: float) -> Iterable[Command]:
        self._gaps.refused(event.node, event.owner, now)
        return ()

    # --- jobs ---

    def _job_submitted(self, event: JobSubmitted, now: float) -> Iterable[Command]:
        if event.job in self.jobs:
            raise ValueError(f"Job {event.job} was submitted before.")
        # A profile does not outlive the daemon that made it; it is taken up again from what is
        # stored.
        state = JobState.RUNNING if event.state is JobState.PROFILING else event.state
        job = JobRecord(
            event,
            len(self.jobs),
            state,
            tries=event.tries,
            last_broke=event.last_broke,
            curve=event.curve,
        )
        self.jobs[event.job] = job
        self._profile_runner.submitted(job, event.learned)
        if not job.state.ended:
            self._unfinished[event.job] = self._at_work[event.job] = job
            self._line.changed(job)
            self._plan_soon(now + self.settings.settle_s)
            self._leases_due = True
        return ()

    def _job_broke(self, event: WorkersFailed, now: float) -> Iterable[Command]:
        job = self.jobs[event.job]
        if job.state.ended:
            return ()
        if job.last_broke is not None and now - job.last_broke > self.settings.retry_window_s:
            job.tries = 0
        job.last_broke = now
        if not (self._profile_runner.holds(job) and self._profile_runner.worked_elsewhere(job)):
            job.tries += 1
        if job.tries >= self.settings.max_tries:
            return self._end(event.job, JobState.FAILED, event.reason, now)
        restart = self._restart(job, now)
        profile = self._profile_runner.crashed(job, now)
        return restart if profile is None else profile

    def _round_interrupted(self, event: RoundInterrupted, now: float) -> Iterable[Command]:
        return self._restart(self.jobs[event.job], now)

    def _restart(self, job: JobRecord, now: float) -> Iterable[Command]:
        if job.nodes:
            job.broken = True
            self._plan_soon(now)
        return ()

    def _curve_learned(self, event: CurveLearned, now: float) -> Iterable[Command]:
        job = self.jobs[event.job]
        job.curve, job.cost = event.curve, event.cost or job.cost
        if not job.state.ended:
            self._plan_soon(now + self.settings.settle_s)
            self._leases_due = True
        return ()

    def _rescale_finished(self, event: RescaleFinished, now: float) -> Iterable[Command]:
        job = self.jobs[event.job]
        if job.rescaling:
            job.rescaling, job.rescaled_at = False, job.rescaled_at if job.forced else now
            if job.planned != self.plans:  # a plan was made that had to leave it as it was
                self._plan_soon(now + max(self.settings.settle_s, self.settings.min_interval_s))
            return self._profile_runner.rescaled(job, now)
        return ()

    def _end(self, name: str, state: JobState, reason: str, now: float) -> Iterable[Command]:
        job = self.jobs[name]
        if self._unfinished.pop(name, None) is None:
            return []  # late news
        news = self._profile_runner.ended(job, now)
        self._at_work.pop(name, None)
        self._line.changed(job)
        self._free(job.nodes, now)
        job.nodes, job.state, job.rescaling, job.broken, job.starving = (
            (),
            state,
            False,
            False,
            False,
        )
        self._plan_soon(now + self.settings.settle_s)
        self._leases_due = True
        return [*news, Stop(name, state, reason)]

    # --- planning ---

    def _plan_soon(self, at: float) -> None:
        self._plan_at = at if self._plan_at is None else min(self._plan_at, at)

    def _candidates(
        self, nodes: Mapping[str, NodeInfo], now: float, *, imagined: bool
    ) -> list[Candidate]:
        """The admitted jobs as bidders for ``nodes``; ``imagined``: for a plan that is only asked
        how many nodes would be of use, to any owner whose leases come up.
        """
        free = (
            Counter(info.node_class for info in nodes.values())
            if imagined
            else +self._usable_by_pool
        )
        candidates: dict[str, Candidate] = {}
        for job in self._line.admitted(free, shared=imagined):
            spec = job.submitted
            held_off = imagined and (
                self._gaps.held_off(spec.owner, now)
                or not any(self._gaps.fits(name, spec.owner, now) for name in nodes)
            )
            if held_off and not job.nodes:
                continue
            candidates[spec.job] = Candidate(
                spec.job,
                spec.min_nodes,
                max(spec.min_nodes, len(job.nodes)) if held_off else spec.max_nodes,
                job.nodes,
                weight=spec.weight,
                goal=spec.goal,
                curve=job.curve,
                sizes=job.sizes,
                cost=job.cost,
                fixed=not imagined and self._stays(job, now),
                broken=job.broken,
                owner=None if imagined else spec.owner,
            )
        for c in candidates.values():
            if c.fixed:
                free -= Counter(nodes[n].node_class for n in c.nodes)
        # Who has a turn gives way in imagination: else the nodes for the next one in the queue
        # would never be asked for.
        holders = [
            c
            for name, c in candidates.items()
            if self.jobs[name].turn_until and not c.fixed and not imagined
        ]
        chosen = turns(holders, self._line.queue(candidates, now), free, nodes)
        return [
            replace(c, must_run=True) if name in chosen else c for name, c in candidates.items()
        ]

    def _stays(self, job: JobRecord, now: float) -> bool:
        """Whether the job keeps its nodes whatever the plan would like: nothing forces it, and it
        is rescaling or was a moment ago.
        """
        if (
            job.broken
            or not job.accepts(len(job.nodes))
            or not all(n in self._usable for n in job.nodes)
        ):
            return False
        if self._profile_runner.holds(job):
            return True
        rested = job.rescaled_at + self.settings.min_interval_s
        if not job.rescaling and now < rested:
            self._plan_soon(rested)
        return job.rescaling or now < rested

    def _review_profiles(self, now: float) -> list[Command]:
        """Let the advisor know how things are, and begin, go on with or give up a profile."""
        jobs = self._line.admitted(+self._usable_by_pool, shared=False)
        return self._profile_runner.review(jobs, bool(self._gaps.coming(self.nodes)), now)

    def _plan(self, now: float) -> list[Command]:
        profile = self._review_profiles(now)
        self._plan_at = None
        candidates = self._candidates(self._usable, now, imagined=False)
        granted = {c.job for c in candidates if c.must_run}
        plan = self._planner(candidates, self._usable, self.settings.planning)
        self.last_plan, self.plans = plan, self.plans + 1
        shrinking: list[Command] = []
        growing: list[Command] = []
        self._at_work.update(
            (name, self._unfinished[name]) for name, new in plan.nodes.items() if new
        )
        for name, job in sorted(self._at_work.items(), key=lambda item: item[1].order):
            old, new = job.nodes, plan.nodes.get(name, ())
            if new and job.starving:
                job.starving, job.turn_until = (
                    False,
                    now + self.settings.starvation_s if name in granted else 0.0,
                )
            if new and new == old and not job.broken:
                continue
            within = self._deadline(old, now)
            job.forced = bool(old) and (job.broken or within is not None)
            self._free(set(old).difference(new), now)
            if new:
                if not old:
                    growing.append(Start(name, new))
                else:
                    (growing if len(new) > len(old) else shrinking).append(
                        Rescale(name, new, within)
                    )
                job.nodes, job.state, job.rescaling, job.broken = new, JobState.RUNNING, True, False
                job.planned = self.plans
            elif old or job.state in (JobState.RUNNING, JobState.PROFILING):
                shrinking.append(Suspend(name, within))
                job.nodes, job.state, job.rescaling, job.broken = (
                    (),
                    JobState.SUSPENDED,
                    False,
                    False,
                )
                job.idle_since, job.turn_until = now, 0.0
            if not new:
                del self._at_work[name]
        for name, new in plan.nodes.items():
            for node in new:
                self.nodes[node].job = name
                self._idle.discard(node)
        self._leases_due = True
        return profile + shrinking + growing

    def _deadline(self, nodes: Iterable[str], now: float) -> float | None:
        """Seconds until the first of ``nodes`` is taken away, ``None`` when none is."""
        ends = [self.nodes[n].gone_at for n in nodes]
        times = [end - now for end in ends if end is not None]
        return max(0.0, min(times)) if times else None

    def _free(self, names: Iterable[str], now: float) -> None:
        for name in names:
            node = self.nodes[name]
            node.job, node.review_at = None, now + self.settings.give_back_after_s
            if node.gone_at is None:
                self._idle.add(name)
