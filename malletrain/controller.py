"""The decision core: a plain state machine, ``handle(event, now) -> [command]``. No I/O, no clock, no threads.

Decides when to plan (near-simultaneous node events are one plan), what follows from a plan, which leases to take and give back, when a job
has failed for good. It does not decide how many nodes a job gets (:mod:`malletrain.planning`, :mod:`allocator`) nor how a rescale is carried
out (:mod:`malletrain.rounds`). The daemon and the simulator are its two shells.

Invariants, tested with random event sequences: a node belongs to at most one job; no job has more nodes than its maximum; a job whose nodes
fall under its minimum is suspended by the next plan and keeps its place, it never fails for that; a node that is leaving or gone is never in
a new plan; jobs are admitted in order of submission; an admitted job without nodes gets its minimum in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from allocator import NodeInfo, RescaleCost, ScalingCurve
from malletrain.events import (
    Command,
    CurveLearned,
    Event,
    GapsSeen,
    GiveBack,
    JobBroke,
    JobCancelled,
    JobCompleted,
    JobState,
    JobSubmitted,
    LeaseNotTaken,
    NodeJoined,
    NodeLeaving,
    NodeLost,
    NodeUnfit,
    Rescale,
    RescaleFinished,
    RoundInterrupted,
    Start,
    Stop,
    Suspend,
    TakeLeases,
    Tick,
)
from malletrain.planning import Candidate, Plan, PlanningSettings, make_plan


@dataclass(frozen=True)
class ControllerSettings:
    """How patient the controller is; times in seconds.

    ``settle_s``: node events this close together are one plan. ``min_interval_s``: a job that
    nothing forces is rescaled no more often than this. ``starvation_s``: an admitted job without nodes for so long gets its minimum,
    and keeps it for as long. ``max_tries``: the job has failed when its workers broke so many times, each within ``retry_window_s`` of
    the last. ``give_back_after_s``: a lease nobody uses is given back. ``min_horizon_s``: shorter gaps are not worth a lease.
    ``lease_wait_s``: a lease asked for that has not come up by then is forgotten. ``unfit_s``: a node on which no launcher comes up is left alone for so long.
    """

    planning: PlanningSettings = field(default_factory=PlanningSettings)
    settle_s: float = 1.0
    min_interval_s: float = 0.0
    starvation_s: float = 600.0
    max_tries: int = 3
    retry_window_s: float = 3600.0
    give_back_after_s: float = 30.0
    min_horizon_s: float = 0.0
    lease_wait_s: float = 120.0
    unfit_s: float = 300.0


@dataclass
class JobRecord:
    """What the controller remembers of a job. Read it from outside, change it only here."""

    submitted: JobSubmitted
    order: int
    state: JobState
    nodes: tuple[str, ...] = ()
    tries: int = 0
    last_broke: float | None = None
    rescaling: bool = False
    broken: bool = False
    idle_since: float = 0.0
    starving: bool = False
    turn_until: float = 0.0
    curve: ScalingCurve | None = None
    cost: RescaleCost | None = None
    rescaled_at: float = -math.inf


@dataclass
class NodeRecord:
    """What the controller remembers of a leased node."""

    info: NodeInfo
    job: str | None = None
    gone_at: float | None = None
    free_since: float = 0.0


class Controller:
    """The state machine. Every method but :meth:`handle` and :meth:`hold` only reads."""

    def __init__(self, settings: ControllerSettings | None = None) -> None:
        self.settings = settings or ControllerSettings()
        self.jobs: dict[str, JobRecord] = {}
        self.nodes: dict[str, NodeRecord] = {}
        self.last_plan: Plan | None = None
        self.plans = 0
        self._submissions = 0
        self._gaps: Mapping[str, tuple[float | None, str]] = {}
        self._leasing: dict[str, float] = {}
        self._plan_at: float | None = None
        self._leases_due = False
        self._unfit_until: dict[str, float] = {}
        self._refusals: dict[str, int] = {}
        self._held_until = 0.0
        self._table: dict[type, Callable[[Any, float], Iterable[Command]]] = {
            NodeJoined: self._node_joined,
            NodeLeaving: self._node_leaving,
            NodeLost: self._node_lost,
            NodeUnfit: self._node_unfit,
            GapsSeen: self._gaps_seen,
            LeaseNotTaken: self._lease_not_taken,
            JobSubmitted: self._job_submitted,
            JobCompleted: self._job_completed,
            JobBroke: self._job_broke,
            RoundInterrupted: self._round_interrupted,
            JobCancelled: self._job_cancelled,
            CurveLearned: self._curve_learned,
            RescaleFinished: self._rescale_finished,
            Tick: lambda event, now: (),
        }

    # --- the two doors ---

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event at time ``now`` (never before the last one) and return what is to be done, in order.

        Raises KeyError for an event about a job that was never submitted; events about unknown nodes are ignored (they may be late).
        """
        commands = list(self._table[type(event)](event, now))
        self._notice_starvation(now)
        if self._plan_at is not None and now >= max(self._plan_at, self._held_until):
            commands += self._plan(now)
        if now >= self._held_until:
            commands += self._give_back(now)
            if self._leases_due:
                commands += self._take_leases(now)
        return commands

    def hold(self, until: float) -> None:
        """Plan nothing before ``until``: after a restart, leases and jobs come back one by one."""
        self._held_until = until
        self._plan_soon(until)

    def next_wakeup(self) -> float | None:
        """When a Tick is due although nothing happens, or ``None``."""
        times = []
        if self._plan_at is not None:
            times.append(max(self._plan_at, self._held_until))
        for job in self._admitted():
            if not job.nodes and not job.starving:
                times.append(job.idle_since + self.settings.starvation_s)
        if any(job.starving for job in self._admitted()):
            times += [job.turn_until for job in self._admitted() if job.nodes and job.turn_until]
        times += [n.free_since + self.settings.give_back_after_s for n in self.nodes.values() if n.job is None and n.gone_at is None]
        return min(times) if times else None

    # --- nodes ---

    def _node_joined(self, event: NodeJoined, now: float) -> Iterable[Command]:
        if event.node in self.nodes:
            yield from self._node_lost(NodeLost(event.node), now)
        self._leasing.pop(event.node, None)
        self._refusals.pop(event.node, None)
        node = NodeRecord(NodeInfo(event.node_class, event.horizon_s, event.group), free_since=now)
        self.nodes[event.node] = node
        job = self.jobs.get(event.job) if event.job else None
        if job and not job.state.ended:
            node.job = event.job
            job.nodes = (*job.nodes, event.node)
        self._plan_soon(now + self.settings.settle_s)

    def _node_leaving(self, event: NodeLeaving, now: float) -> Iterable[Command]:
        node = self.nodes.get(event.node)
        if node is None:
            return ()
        node.gone_at = now + event.in_s
        if node.job:
            self._plan_soon(now + min(self.settings.settle_s, event.in_s / 4))
        return ()

    def _node_lost(self, event: NodeLost, now: float) -> Iterable[Command]:
        self._leasing.pop(event.node, None)
        node = self.nodes.pop(event.node, None)
        if node and node.job:
            job = self.jobs[node.job]
            job.nodes = tuple(n for n in job.nodes if n != event.node)
            job.broken = True
            self._plan_soon(now + self.settings.settle_s)
        return ()

    def _node_unfit(self, event: NodeUnfit, now: float) -> Iterable[Command]:
        node = self.nodes.pop(event.node, None)
        if node is None:
            return ()
        if node.job:
            job = self.jobs[node.job]
            job.nodes = tuple(n for n in job.nodes if n != event.node)
            self._plan_soon(now + self.settings.settle_s)
        self._unfit_until[event.node] = now + self.settings.unfit_s
        return [GiveBack((event.node,))]

    def _gaps_seen(self, event: GapsSeen, now: float) -> Iterable[Command]:
        self._gaps = event.gaps
        self._leasing = {n: t for n, t in self._leasing.items() if now - t < self.settings.lease_wait_s}
        self._leases_due = True
        return ()

    def _lease_not_taken(self, event: LeaseNotTaken, now: float) -> Iterable[Command]:
        if self._leasing.pop(event.node, None) is not None:
            refusals = self._refusals.get(event.node, 0) + 1
            self._refusals[event.node] = refusals
            if refusals > 1:
                self._unfit_until[event.node] = now + min(self.settings.unfit_s, 2.0**refusals)
        return ()

    # --- jobs ---

    def _job_submitted(self, event: JobSubmitted, now: float) -> Iterable[Command]:
        if event.job in self.jobs:
            raise ValueError(f"Job {event.job} was submitted before.")
        self._submissions += 1
        self.jobs[event.job] = JobRecord(event, self._submissions, event.state, tries=event.tries, idle_since=now, curve=event.curve)
        self._plan_soon(now + self.settings.settle_s)
        self._leases_due = True
        return ()

    def _job_completed(self, event: JobCompleted, now: float) -> Iterable[Command]:
        return self._end(event.job, JobState.COMPLETED, "", now)

    def _job_cancelled(self, event: JobCancelled, now: float) -> Iterable[Command]:
        return self._end(event.job, JobState.CANCELLED, "cancelled by its owner", now)

    def _job_broke(self, event: JobBroke, now: float) -> Iterable[Command]:
        job = self.jobs[event.job]
        if job.state.ended:
            return ()
        if job.last_broke is not None and now - job.last_broke > self.settings.retry_window_s:
            job.tries = 0
        job.tries, job.last_broke = job.tries + 1, now
        if job.tries >= self.settings.max_tries:
            return self._end(event.job, JobState.FAILED, event.reason, now)
        job.broken = True
        self._plan_soon(now)
        return ()

    def _round_interrupted(self, event: RoundInterrupted, now: float) -> Iterable[Command]:
        job = self.jobs[event.job]
        if not job.state.ended:
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
            job.rescaling, job.rescaled_at = False, now
            self._plan_soon(now + self.settings.settle_s)
        return ()

    def _end(self, name: str, state: JobState, reason: str, now: float) -> Iterable[Command]:
        job = self.jobs[name]
        if job.state.ended:
            return
        self._free(job.nodes, now)
        job.nodes, job.state, job.rescaling, job.broken, job.starving = (), state, False, False, False
        self._plan_soon(now + self.settings.settle_s)
        self._leases_due = True
        yield Stop(name, state, reason)

    # --- planning ---

    def _plan_soon(self, at: float) -> None:
        self._plan_at = at if self._plan_at is None else min(self._plan_at, at)

    def _admitted(self) -> list[JobRecord]:
        unfinished = [job for job in self.jobs.values() if not job.state.ended]
        return unfinished[: self.settings.planning.max_running]

    def _usable(self) -> dict[str, NodeInfo]:
        return {name: node.info for name, node in self.nodes.items() if node.gone_at is None}

    def _notice_starvation(self, now: float) -> None:
        for job in self._admitted():
            if not job.nodes and not job.starving and now - job.idle_since >= self.settings.starvation_s:
                job.starving = True
                self._plan_soon(now)
            if job.nodes and 0 < job.turn_until <= now:
                job.turn_until = 0.0
                if any(other.starving for other in self._admitted()):
                    self._plan_soon(now)

    def _candidates(self, capacity: int, now: float | None) -> list[Candidate]:
        """The admitted jobs as bidders; ``now`` is None for a plan that is only asked how many more nodes would be of use."""
        admitted = self._admitted()
        left = capacity
        must_run = set()
        for job in sorted(admitted, key=lambda j: (not j.turn_until, j.idle_since, j.order)):
            if (job.starving or job.turn_until) and job.submitted.min_nodes <= left:
                left -= job.submitted.min_nodes
                must_run.add(job.submitted.job)
        candidates = []
        for job in admitted:
            spec = job.submitted
            whole = not job.broken and all(self.nodes[n].gone_at is None for n in job.nodes)
            candidates.append(
                Candidate(
                    spec.job,
                    spec.min_nodes,
                    spec.max_nodes,
                    job.nodes,
                    weight=spec.weight,
                    goal=spec.goal,
                    curve=job.curve,
                    sizes=spec.sizes,
                    cost=job.cost,
                    fixed=now is not None and whole and bool(job.nodes) and self._unmoved(job, now),
                    must_run=spec.job in must_run,
                )
            )
        return candidates

    def _unmoved(self, job: JobRecord, now: float) -> bool:
        """Whether the job is left at its size by a plan that could move it: it is being rescaled, or was a moment ago."""
        if job.rescaling:
            return True
        rested = job.rescaled_at + self.settings.min_interval_s
        if now < rested:
            self._plan_soon(rested)
        return now < rested

    def _plan(self, now: float) -> list[Command]:
        self._plan_at = None
        usable = self._usable()
        plan = make_plan(self._candidates(len(usable), now), usable, self.settings.planning)
        self.last_plan, self.plans = plan, self.plans + 1
        shrinking: list[Command] = []
        growing: list[Command] = []
        for name, new in plan.nodes.items():
            job = self.jobs[name]
            old = job.nodes
            within = self._deadline(old, now)
            self._free([n for n in old if n not in new], now)
            if new:
                job.turn_until = now + self.settings.starvation_s if job.starving else job.turn_until
                job.starving = False
                if not old and not job.broken:
                    growing.append(Start(name, new))
                elif new != old or job.broken:
                    (growing if len(new) > len(old) else shrinking).append(Rescale(name, new, within))
                else:
                    continue
                job.nodes, job.state, job.rescaling, job.broken = new, JobState.RUNNING, True, False
            elif old or job.broken or job.state in (JobState.RUNNING, JobState.PROFILING):
                shrinking.append(Suspend(name, within))
                job.nodes, job.state, job.rescaling, job.broken = (), JobState.SUSPENDED, False, False
                job.idle_since, job.turn_until = now, 0.0
        for name, new in plan.nodes.items():
            for node in new:
                self.nodes[node].job = name
        self._leases_due = True
        return shrinking + growing

    def _deadline(self, nodes: Iterable[str], now: float) -> float | None:
        """Seconds until the first of ``nodes`` is taken away, ``None`` when none is."""
        ends = [self.nodes[n].gone_at for n in nodes if n in self.nodes]
        times = [end - now for end in ends if end is not None]
        return max(0.0, min(times)) if times else None

    def _free(self, names: Iterable[str], now: float) -> None:
        for name in names:
            if name in self.nodes:
                self.nodes[name].job, self.nodes[name].free_since = None, now

    # --- leases ---

    def _take_leases(self, now: float) -> list[Command]:
        """Ask for as many gaps as a plan that had them all would use."""
        self._leases_due = False
        gaps = {
            name: NodeInfo(node_class, horizon)
            for name, (horizon, node_class) in self._gaps.items()
            if name not in self.nodes
            and name not in self._leasing
            and now >= self._unfit_until.get(name, now)
            and (horizon is None or horizon >= self.settings.min_horizon_s)
        }
        if not gaps or not self._admitted():
            return []
        coming = {name: NodeInfo(self._gaps[name][1], self._gaps[name][0]) for name in self._leasing if name in self._gaps}
        have = {**self._usable(), **coming}
        imagined = make_plan(self._candidates(len(have) + len(gaps), None), {**have, **gaps}, self.settings.planning)
        used = sum(len(nodes) for nodes in imagined.nodes.values())
        wanted = max(0, used - len(have))
        longest = sorted(gaps.items(), key=lambda gap: (gap[1].horizon_s is not None, -(gap[1].horizon_s or 0.0), gap[0]))
        chosen = tuple(name for name, _ in longest[:wanted])
        self._leasing.update(dict.fromkeys(chosen, now))
        return [TakeLeases(chosen)] if chosen else []

    def _give_back(self, now: float) -> list[Command]:
        idle = tuple(
            name
            for name, node in self.nodes.items()
            if node.job is None and node.gone_at is None and now - node.free_since >= self.settings.give_back_after_s
        )
        for name in idle:
            del self.nodes[name]
        return [GiveBack(idle)] if idle else []
