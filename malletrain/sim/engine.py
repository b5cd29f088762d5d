"""The simulation: the daemon's own controller on a virtual clock, with a trace instead of a machine
and model jobs instead of processes.

:class:`Simulation` decides the order of events and applies the controller's commands to model jobs.
It tells the controller of a job's submission (:func:`submission`) and progress (:func:`work_done`).
The controller (:mod:`malletrain.core.controller`), the same code as in the daemon, makes every
other decision. :mod:`malletrain.sim.model_jobs` decides the effect of a rescale on a job.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum

import numpy as np

from malletrain.core.commands import (
    Announce,
    BatchAdvised,
    Command,
    KeepScalingModel,
    LossExpected,
    ReclaimNodes,
    ReleaseLeases,
    Rescale,
    Start,
    Stop,
    Suspend,
    TakeLeases,
)
from malletrain.core.events import (
    Event,
    ForecastsUpdated,
    GapsSeen,
    JobCompleted,
    JobState,
    JobSubmitted,
    LeaseNotTaken,
    LimitsChanged,
    NodeJoined,
    NodeLeaving,
    NodeLost,
    PricesChanged,
    RescaleFinished,
    Tick,
)
from malletrain.core.goals import OwnerGoals, WorkReported
from malletrain.protocol.event_kinds import EventKind
from malletrain.sim.idle import require_time
from malletrain.sim.model_jobs import Cause, Reports, SimRun, kind_of
from malletrain.sim.policies import Policy
from malletrain.sim.results import Floats, IdealThroughput, Result, count_goals
from malletrain.sim.settings import SimSettings, forecaster
from malletrain.sim.slot_kinds import SlotKinds, use_by_kind
from malletrain.sim.workloads import SimJob, WorkloadError
from scavenger.trace.trace import Trace


def submission(job: SimJob, policy: Policy, reports: Reports) -> JobSubmitted:
    """Return the submission of the job. It contains the amount of work only if the job has a
    deadline or a budget.
    """
    profiled = policy.profiled(job)
    goals = OwnerGoals()
    if job.deadline_s is not None or job.budget_nh is not None:
        budget_s = None if job.budget_nh is None else 3600.0 * job.budget_nh
        goals = OwnerGoals(job.deadline_s, budget_s, job.samples)
    return JobSubmitted(
        job.name,
        *policy.limits(job),
        weight=job.weight,
        goal=job.goal,
        curve=policy.stated(job),
        sizes=job.sizes,
        profile=profiled,
        scaling=reports.starts_with(job) if profiled else None,
        kind=kind_of(job) if job.model else "",
        goals=goals,
        party=job.user,
        exempt_from_shares=job.deadline_s is not None,  # as in the daemon
        trainer=job.trainer,
        node_class=job.node_class,
    )


def work_done(runs: Iterable[SimRun], now: float) -> list[WorkReported]:
    """Return the progress of the jobs with goals that have nodes."""
    reports = []
    for run in runs:
        if run.nodes and (run.job.deadline_s is not None or run.job.budget_nh is not None):
            run.accrue(now)
            reports.append(WorkReported(run.job.name, max(0.0, run.done)))
    return reports


PROGRESS_EVERY = 500
"""Number of clock steps between two reports of progress."""


class _Kind(IntEnum):
    """Kinds of events, in their order at one instant."""

    RESUMED = 0
    COMPLETED = 1
    LOST = 2
    LEASED = 3
    SUBMITTED = 4
    REPORTED = 5
    GROWN = 6


class Simulation:
    """One simulation.

    Args:
        trace: idle nodes over time.
        jobs: the workload.
        settings: settings; None for the defaults.
        kinds: kinds of slots; None if all nodes are alike.

    Raises:
        WorkloadError: there is nothing to simulate, or a job runs on a kind that does not exist.
    """

    def __init__(
        self,
        trace: Trace,
        jobs: Sequence[SimJob],
        settings: SimSettings | None = None,
        kinds: SlotKinds | None = None,
    ) -> None:
        self.settings = settings or SimSettings()
        if not trace.names or not len(trace):
            raise WorkloadError(
                "The trace has no node that is ever idle; there is nothing to simulate."
            )
        require_time(trace)
        if not jobs:
            raise WorkloadError("There is no job to simulate.")
        if min(job.min_nodes for job in jobs) > len(trace.names):
            raise WorkloadError(
                f"Every job needs more than the {len(trace.names)} nodes of the trace."
            )
        self.kinds = kinds or SlotKinds()
        self.kinds.require(jobs, trace.names)
        s = self.settings
        self.trace = trace
        self.costs = s.policy.world(s.costs)
        profiling = any(map(s.policy.profiled, jobs))
        self.controller = s.policy.controller(self.costs, s.controller(), profiling=profiling)
        self.controller.handle(PricesChanged(self.kinds.prices), 0.0)
        self.end = trace.duration_s if s.hours is None else min(trace.duration_s, s.hours * 3600.0)
        self.now = 0.0
        self.runs = {job.name: SimRun(job, job.rates(), self.costs) for job in jobs}
        if len(self.runs) != len(jobs):
            raise WorkloadError("Two jobs of the workload have the same name.")
        self.unfinished: dict[str, SimRun] = {}
        self.to_come = len(jobs)
        self.decisions_s: list[float] = []
        self._heap: list[tuple[float, int, int, str, int]] = []
        self._number = 0
        self._bound = IdealThroughput(len(trace.names))
        self._any_min = any(job.min_nodes > 1 for job in jobs)
        self._goals = any(job.deadline_s or job.budget_nh for job in jobs)
        self._bound_by_kind = all(job.node_class for job in jobs)
        self._tables = {"": np.zeros(1)}
        self._tables_outdated = True
        self._idle_count: Counter[str] = Counter()
        """Kind → number of idle slots; empty: of all kinds"""
        self._idle_since: dict[str, float] = {}
        self._leased: set[str] = set()
        self._leaving: set[str] = set()
        self._holder: dict[str, SimRun] = {}
        self._gaps: dict[str, tuple[float | None, str]] = {}
        self._gaps_changed = False
        self._forecaster = forecaster(s.foresight, trace)
        self._max_sizes = {job.name: s.policy.limits(job)[1] for job in jobs}
        self._reports = Reports(s.seed, revealed=s.revealed, sized=s.sized)
        self.profiles = 0
        self.ideal = 0.0
        self.idle_node_s = 0.0
        self.series: list[tuple[float, int, int]] = []
        """(time, idle nodes, nodes with a job), recorded every ``sample_s``"""
        for job in jobs:
            self._schedule(job.submit_s, _Kind.SUBMITTED, job.name)

    # --- the clock ---

    def run(self, on_progress: Callable[[float], None] = lambda part: None) -> Result:
        """Simulate to the end of the trace, of the requested time, or of the work, whichever comes
        first. ``on_progress`` is called regularly with the completed fraction of the time.
        """
        began = time.perf_counter()
        batches = self.trace.batches()
        batch = next(batches, None)
        turns = 0
        while self.to_come or self.unfinished:
            wake = self.controller.next_wakeup()
            due = min(
                self._heap[0][0] if self._heap else math.inf,
                batch.time if batch is not None else math.inf,
                math.inf if wake is None else max(wake, self.now),
            )
            if due >= self.end:
                self._advance(self.end)
                break
            self._advance(due)
            turns += 1
            if turns % PROGRESS_EVERY == 0:
                on_progress(self.now / self.end)
            events: list[Event] = []
            if batch is not None and batch.time <= due:
                events += self._apply_trace(batch.idle.tolist(), batch.busy.tolist())
                batch = next(batches, None)
                if self._forecaster:
                    self._forecaster.update(self._idle_since, self.now)
            while self._heap and self._heap[0][0] <= due:
                _, kind, _, name, version = heapq.heappop(self._heap)
                events += self._handle_due(_Kind(kind), name, version)
            self._tell(events)
        for run in self.unfinished.values():
            run.accrue(self.now)
            if not run.nodes and run.job.name in self.controller.jobs:
                run.waited(self.controller.jobs[run.job.name].idle_since, self.now)
        return tally(self, time.perf_counter() - began)

    def _advance(self, end: float) -> None:
        """Advance the clock to ``end`` without a change of state."""
        if end > self.now:
            if self._tables_outdated:
                self._tables = self._bounds()
                self._tables_outdated = self._any_min
            idle = len(self._idle_since)
            if self.settings.sample_s is not None:
                while (at := len(self.series) * self.settings.sample_s) < end:
                    self.series.append((at, idle, len(self._holder)))
            for kind, table in self._tables.items():
                count = self._idle_count[kind]
                self.ideal += float(table[min(count, len(table) - 1)]) * (end - self.now)
            self.idle_node_s += idle * (end - self.now)
            self.now = end

    def _bounds(self) -> dict[str, Floats]:
        """Return kind → ideal throughput by number of idle slots. If some jobs run on any kind, one
        bound for all slots, in which jobs may mix them.
        """
        jobs = self._admitted()
        if not self._bound_by_kind:
            return {"": self._bound.table(map(self._bound.kind, jobs))}
        by_kind: dict[str, list[int]] = {}
        for job in jobs:
            by_kind.setdefault(job.node_class, []).append(self._bound.kind(job))
        return {kind: self._bound.table(rows) for kind, rows in by_kind.items()}

    def _admitted(self) -> list[SimJob]:
        """Return the jobs that may run now, and those that have nodes."""
        chosen, places = [], self.settings.max_running

        def fits(job: SimJob) -> bool:
            return job.accepted_sizes[0] <= self._idle_count[job.node_class]

        for run in self.unfinished.values():
            if places and (not self._any_min or fits(run.job)):
                places -= 1
                chosen.append(run.job)
            elif run.nodes:
                chosen.append(run.job)
            if not places and not self._any_min:
                break
        return chosen

    def _schedule(self, when: float, kind: _Kind, name: str, version: int = 0) -> None:
        self._number += 1
        heapq.heappush(self._heap, (when, kind, self._number, name, version))

    # --- events of the simulation ---

    def _apply_trace(self, idle: Iterable[int], busy: Iterable[int]) -> list[Event]:
        names = self.trace.names
        notice = self.costs.notice_s if self.costs.semantics == "real" else 0.0
        events: list[Event] = []
        lost_nodes: dict[str, list[str]] = {}
        for k in busy:
            name = names[k]
            del self._idle_since[name]
            self._count_idle(name, -1)
            if name not in self._leased:
                self._gaps_changed |= self._gaps.pop(name, None) is not None
                continue
            run = self._holder.get(name)
            if notice > 0 and name not in self._leaving:
                self._leaving.add(name)
                self._schedule(self.now + notice, _Kind.LOST, name)
                events.append(NodeLeaving(name, notice))
                if run is not None:
                    run.leaves(self.now)
            elif notice <= 0:
                if run is not None:
                    lost_nodes.setdefault(run.job.name, []).append(name)
                events.append(self._lost(name))
        for job, nodes in lost_nodes.items():
            self.runs[job].loses(nodes, self.now)
            self._schedule_end(self.runs[job])
        for k in idle:
            name = names[k]
            self._idle_since[name] = self.now
            self._count_idle(name, 1)
            if name not in self._leased:
                self._offer(name)
        self._tables_outdated |= self._any_min
        return events

    def _count_idle(self, name: str, change: int) -> None:
        self._idle_count[""] += change
        self._idle_count[self.kinds.of(name)] += change

    def _lost(self, name: str) -> Event:
        self._leased.discard(name)
        self._leaving.discard(name)
        self._holder.pop(name, None)
        return NodeLost(name)

    def _handle_due(self, kind: _Kind, name: str, version: int) -> list[Event]:
        if kind is _Kind.LOST:
            run = self._holder.get(name)
            if run is not None:
                run.loses((name,), self.now)
                self._schedule_end(run)
            event = self._lost(name)
            self._offer(name)
            return [event]
        if kind is _Kind.LEASED:
            return self._leases_up((name,))
        run = self.runs[name]
        if kind is _Kind.SUBMITTED:
            self.to_come -= 1
            self.unfinished[name] = run
            self._tables_outdated = True
            return [submission(run.job, self.settings.policy, self._reports)]
        if kind is _Kind.GROWN:
            return self._grown(run)
        if version != run.version:
            return []
        if kind is _Kind.REPORTED:
            self._report_later(run)
            return [*self._reports.report(run, self.now)]
        if kind is _Kind.RESUMED:
            run.resumed(self.now)
            self._schedule_end(run)
            return self._resumed(run)
        self._release(run)
        run.ended(self.now)
        del self.unfinished[name]
        self._tables_outdated = True
        self._reports.news = True  # another job is next
        return [JobCompleted(name)]

    def _leases_up(self, names: Iterable[str]) -> list[Event]:
        """Start the requested leases on the nodes that are still idle."""
        events: list[Event] = []
        for name in names:
            if name in self._idle_since:
                del self._gaps[name]
                self._leased.add(name)
                events.append(NodeJoined(name, self.kinds.of(name)))
            else:
                events.append(LeaseNotTaken(name))
        return events

    def _grow_later(self, run: SimRun) -> None:
        """Schedule the next growth of the job's maximum size, if the policy has a ramp."""
        ramp = self.settings.policy.ramp
        if ramp and self._max_sizes[run.job.name] < run.job.accepted_sizes[-1]:
            self._schedule(self.now + ramp.every_s, _Kind.GROWN, run.job.name)

    def _grown(self, run: SimRun) -> list[Event]:
        """Raise the maximum size of a job that has as many nodes."""
        ramp, name, events = self.settings.policy.ramp, run.job.name, list[Event]()
        assert ramp is not None
        if run.ended_at is not None:
            return events
        if len(run.nodes) >= self._max_sizes[name]:
            self._max_sizes[name] = ramp.grown(run.job, self._max_sizes[name])
            smallest = self.settings.policy.limits(run.job)[0]
            events.append(LimitsChanged(name, smallest, self._max_sizes[name]))
        self._grow_later(run)
        return events

    def _offer(self, name: str) -> None:
        if name in self._idle_since:
            self._gaps[name] = (None, self.kinds.of(name))
            self._gaps_changed = True

    def _schedule_end(self, run: SimRun) -> None:
        """Schedule the end of the job's pause or of its work."""
        if run.resumes_at is not None:
            self._schedule(run.resumes_at, _Kind.RESUMED, run.job.name, run.version)
        elif run.training and (when := run.done_at()) < self.end:
            self._schedule(when, _Kind.COMPLETED, run.job.name, run.version)

    # --- reports of progress ---

    def _resumed(self, run: SimRun) -> list[Event]:
        """Return the events of a job that processes samples at a new scale."""
        events: list[Event] = [RescaleFinished(run.job.name)]
        if self.controller.jobs[run.job.name].submitted.profile:
            suggested = self._reports.described(run.job)
            if suggested is not None:
                events.append(suggested)
            self._report_later(run)
        return events

    def _report_later(self, run: SimRun) -> None:
        profiled = self.controller.jobs[run.job.name].state is JobState.PROFILING
        due = self._reports.due(run, self.now, profiled=profiled)
        if due is not None:
            self._schedule(due, _Kind.REPORTED, run.job.name, run.version)

    # --- the controller ---

    def _tell(self, events: list[Event]) -> None:
        """Send events to the controller and carry out its commands, until there are no more."""
        plan_at = self.controller.state.plan_at
        plans = self._gaps_changed or (plan_at is not None and plan_at <= self.now)
        if plans and self._forecaster:
            forecasts = self._forecaster.forecasts(self.now)
            horizons = {name: forecasts[name].horizon_s for name in self._gaps}
            self._gaps = {name: (horizons[name], c) for name, (_, c) in self._gaps.items()}
            events.append(ForecastsUpdated(forecasts))
            self._gaps_changed = True
        if self._gaps_changed:
            self._gaps_changed = False
            events.append(GapsSeen(dict(self._gaps)))
        if self._goals:
            events += work_done(self.unfinished.values(), self.now)
        while True:
            before = self.controller.plans
            began = time.perf_counter()
            commands = self.controller.handle_all(events or [Tick()], self.now)
            if self.controller.plans != before:
                self.decisions_s.append(time.perf_counter() - began)
            events = [event for command in commands for event in self._carry_out(command)]
            events += self._reports.for_waiting(self.controller, self.runs)
            if not events:
                return

    def _carry_out(self, command: Command) -> list[Event]:
        if isinstance(command, TakeLeases):
            if self.settings.lease_delay_s <= 0:
                return self._leases_up(command.nodes)
            for name in command.nodes:
                self._schedule(self.now + self.settings.lease_delay_s, _Kind.LEASED, name)
            return []
        if isinstance(command, ReleaseLeases):
            for name in command.nodes:
                self._leased.discard(name)
                self._offer(name)
            return []
        # All simulated jobs have one owner, so no node is ever reclaimed. They keep their batch.
        if isinstance(command, Stop | ReclaimNodes | BatchAdvised):
            return []
        run = self.runs[command.job]
        if isinstance(command, KeepScalingModel):
            self._reports.keep(run.job, command)
            return []
        if run.ended_at is not None:  # at this instant, with the event that led to the command
            return []
        if isinstance(command, LossExpected):
            run.expects_loss(command.in_s, self.now)
            self._schedule_end(run)
            return []
        if isinstance(command, Announce):
            self.profiles += command.kind == EventKind.PROFILE_FINISHED
            if command.kind == EventKind.PROFILE_STARTED and run.training:
                self._report_later(run)  # at its current size
            return []
        self._release(run)
        run.accrue(self.now)
        if isinstance(command, Suspend):
            run.suspend(self.now)
            return []
        run.kind = self.kinds.of(command.nodes[0])
        if isinstance(command, Start):
            run.waited(self.controller.jobs[command.job].idle_since, self.now)
            if run.first_start is None:
                self._grow_later(run)
            run.start(command.nodes, self.now)
        else:
            assert isinstance(command, Rescale)
            run.rescale(command.nodes, self.now)
        for name in command.nodes:
            self._holder[name] = run
        self._schedule_end(run)
        return self._resumed(run) if run.training else []

    def _release(self, run: SimRun) -> None:
        for name in run.nodes:
            if (
                self._holder.get(name) is run
            ):  # else an earlier command gave the node to another job
                del self._holder[name]


def tally(sim: Simulation, wall_s: float) -> Result:
    """Return the outcome of a simulation that has run."""
    runs = list(sim.runs.values())
    submitted = [run for run in runs if run.first_start is not None or run.job.submit_s <= sim.now]
    done = [run for run in runs if run.ended_at is not None]
    samples = math.fsum(run.done for run in runs)
    lost = {cause: math.fsum(run.lost[cause] for run in runs) for cause in Cause}
    node_s = {key: math.fsum(run.node_s[key] for run in runs) for key in (None, *Cause)}
    idle = sim.idle_node_s
    decisions = np.array(sim.decisions_s or [0.0]) * 1e3
    goals = count_goals(runs, sim.now, sim.kinds.prices)
    waits = [run.longest_wait_s / 3600.0 for run in runs if run.starts or run.longest_wait_s]
    started = [(run.first_start or 0.0, run.ended_at or 0.0, run.job.submit_s) for run in done]
    return Result(
        policy=sim.settings.policy.name,
        costs=sim.settings.costs.semantics,
        nodes=len(sim.trace.names),
        max_running=sim.settings.max_running,
        t_fwd_s=sim.settings.t_fwd_s,
        hours=sim.now / 3600.0,
        jobs=len(submitted),
        samples=samples,
        ideal_samples=sim.ideal,
        fraction_of_ideal=samples / sim.ideal if sim.ideal > 0 else 0.0,
        equivalent_nodes=idle / sim.now if sim.now > 0 else 0.0,
        harvested_fraction=node_s[None] / idle if idle > 0 else 0.0,
        start_fraction=node_s[Cause.START] / idle if idle > 0 else 0.0,
        rescale_fraction=node_s[Cause.RESCALE] / idle if idle > 0 else 0.0,
        preemption_fraction=node_s[Cause.PREEMPTION] / idle if idle > 0 else 0.0,
        snapshot_fraction=node_s[Cause.SNAPSHOT] / idle if idle > 0 else 0.0,
        snapshot_loss=lost[Cause.SNAPSHOT],
        redone_fraction=sum(run.redone_node_s for run in runs) / idle if idle > 0 else 0.0,
        rescale_loss=lost[Cause.RESCALE],
        preemption_loss=lost[Cause.PREEMPTION],
        start_loss=lost[Cause.START],
        starts=sum(run.starts for run in runs),
        rescales=sum(run.rescales for run in runs),
        preemptions=sum(run.preemptions for run in runs),
        jobs_completed=len(done),
        mean_job_hours=sum(end - begin for begin, end, _ in started) / len(started) / 3600.0
        if started
        else None,
        mean_wait_hours=sum(begin - submit for begin, _, submit in started) / len(started) / 3600.0
        if started
        else None,
        deadlines=goals.deadlines,
        deadlines_met=goals.met,
        budgets_overspent=goals.overspent,
        plans=sim.controller.plans,
        profiles=sim.profiles,
        mean_decision_ms=float(decisions.mean()),
        p95_decision_ms=float(np.percentile(decisions, 95)),
        max_decision_ms=float(decisions.max()),
        wall_s=wall_s,
        node_hours_by_user=_by_user(runs),
        longest_wait_hours=max(waits, default=0.0),
        p95_wait_hours=float(np.percentile(waits or [0.0], 95)),
        slots_by_kind=use_by_kind(sim.kinds, sim.trace, runs, sim.now) if sim.kinds.kind_of else (),
    )


def _by_user(runs: list[SimRun]) -> dict[str, float]:
    node_hours: dict[str, float] = {}
    for run in runs:
        if run.job.user:
            hours = math.fsum(run.node_s.values()) / 3600.0
            node_hours[run.job.user] = node_hours.get(run.job.user, 0.0) + hours
    return dict(sorted(node_hours.items()))


def simulate(
    trace: Trace,
    jobs: Sequence[SimJob],
    settings: SimSettings | None = None,
    kinds: SlotKinds | None = None,
) -> Result:
    """Simulate ``jobs`` on the idle nodes of ``trace`` and return the result.

    Args:
        trace: idle nodes over time.
        jobs: the workload.
        settings: settings; None for the defaults.
        kinds: kinds of slots; None if all nodes are alike.

    Raises:
        WorkloadError: there is nothing to simulate, or a job runs on a kind that does not exist.
    """
    return Simulation(trace, jobs, settings, kinds).run()
