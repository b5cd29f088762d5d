"""The controller's shell: passes events to it, carries out its commands, and saves everything
before messages are sent.

The order in a transaction: an event occurs → the controller and the rounds decide → the store is
written → messages are sent. The transactions of one batch are committed together
(:mod:`malletrain.daemon.engine.transactions`). A daemon that is killed between two batches loses
nothing. One that is killed within a batch has not sent any message of it. After a failed
transaction memory and store may differ: this core ends (:meth:`Core.fail`), and another one starts
from the store, as after a restart. Jobs continue meanwhile.

Decides also when the core wakes although no event arrives (:class:`Alarm`), and how long progress
reports are collected for one transaction (:class:`Gathering`), because a transaction looks at every
job and a thousand jobs report every second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from allocator import Goal, RescaleCost, ScalingCurve
from jpa.costs import RESCALE_KINDS
from malletrain.config.model import Config
from malletrain.core.events import (
    CurveChanged,
    Event,
    JobState,
    JobSubmitted,
    Progressed,
    RescaleCostMeasured,
    Tick,
    WeightChanged,
)
from malletrain.core.goals import GoalsSoFar, OwnerGoals
from malletrain.core.records import JobRecord
from malletrain.core.trainers import Trainer
from malletrain.daemon.engine.agent_liveness import LivenessMonitor
from malletrain.daemon.engine.state import DaemonState
from malletrain.daemon.engine.transactions import CommandRunner, LeaseCommands, TransactionRunner
from malletrain.daemon.jobs.curves import InitialCurve
from malletrain.daemon.jobs.monitor import JobMonitor
from malletrain.daemon.jobs.repository import ActiveJob, decode_spec, is_arriving, not_completed
from malletrain.daemon.site.settings import ROUNDS, round_settings
from malletrain.protocol import messages
from malletrain.protocol.event_kinds import EventKind
from malletrain.rounds.interface import Rounds
from malletrain.store.records import JobRow

MIN_DELAY_S = 0.005
"""Minimum delay of a call, seconds, so that calls do not monopolise the loop."""


class Alarm:
    """The timer of one core.

    Args:
        guard: wraps a function as a callback of the loop.
        now: returns the time, seconds.
        when: returns the next due time, seconds; None if nothing is due.
        ring: called at that time.
    """

    def __init__(
        self,
        guard: Callable[[Callable[[], None]], Callable[[], None]],
        now: Callable[[], float],
        when: Callable[[], float | None],
        ring: Callable[[], None],
    ) -> None:
        self._set_timer_guarded, self._ring = guard(self._set_timer), guard(ring)
        self._now, self._when = now, when
        self._pending_update: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        """Compute the due time again, once in this round of the loop."""
        if self._pending_update is None:
            self._pending_update = asyncio.get_running_loop().call_soon(self._set_timer_guarded)

    def close(self) -> None:
        """Cancel all pending calls."""
        for handle in (self._pending_update, self._timer):
            if handle is not None:
                handle.cancel()
        self._pending_update = self._timer = None

    def _set_timer(self) -> None:
        self._pending_update = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due := self._when()) is not None:
            delay = max(MIN_DELAY_S, due - self._now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._ring)


GATHER_S = 0.1
"""Time for which the first report waits, seconds."""


@dataclass
class GatheredReports:
    """The newest reports of each job since the last transaction."""

    progress: dict[str, Progressed] = field(default_factory=dict)
    """Events for the controller, by job id."""
    to_save: dict[str, ActiveJob] = field(default_factory=dict)
    """Jobs whose progress is to be saved, by id."""


class Gathering:
    """Collects the reports of one core. ``take``: called with them, from the loop."""

    def __init__(self, take: Callable[[GatheredReports], None]) -> None:
        self._take = take
        self._reports = GatheredReports()
        self._timer: asyncio.TimerHandle | None = None

    def progressed(self, event: Progressed) -> None:
        """Add a progress event for the controller."""
        self._reports.progress[event.job] = event
        self._start_timer()

    def save(self, run: ActiveJob) -> None:
        """Add a job whose progress is to be saved."""
        self._reports.to_save[run.row.id] = run
        self._start_timer()

    def close(self) -> None:
        """Cancel the timer. Waiting reports are dropped."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self._hand_over)

    def _hand_over(self) -> None:
        reports, self._reports, self._timer = self._reports, GatheredReports(), None
        self._take(reports)


MEASURED_EVERY_S, OBSERVED_EVERY_S = 0.2, 1.0
"""Interval at which the controller receives the progress of the job being profiled, and that of the
other jobs.
"""
RECONNECT_HEARTBEATS = 3
"""Number of unanswered heartbeats after which agents reconnect (:mod:`malletrain.agent.link`)."""
PARTITION_HOLD_S = 60.0
"""Time for which planning is suspended after the last check that found a partition, seconds."""
SERVICE_COST = RescaleCost(up_s=1.0, down_s=1.0, start_s=5.0)
"""Rescale costs of a service and of a farm, seconds. They do not stop: joiners start next to the
others, and leavers hand over what they hold. The costs are above 0 so that plans do not swap nodes
without a benefit.
"""


class Core:
    """Runs the decision steps, and holds the unfinished jobs. Create it within the loop in which it
    runs.

    Args:
        state: the daemon's state; its fields are attributes here too.
        leases: takes and ends leases for the controller.
    """

    def __init__(self, state: DaemonState, leases: LeaseCommands) -> None:
        self._state, self.store = state, state.store
        self.clock, self.metrics = state.clock, state.metrics
        self.accounts, self.controller = state.accounts, state.controller
        self.parties, self._shares = state.parties, state.shares
        self.audit, self.repository = state.audit, state.repository
        self.curves, self.lease_rows = state.curves, state.lease_rows
        self.goals, self.slow, self.news = state.goals, state.slow, state.news
        self.sick = state.sick
        self.agents, self.rounds, self.runs = state.agents, state.rounds, state.runs
        self.transmit = state.outbox.answer
        """Answer a peer, now or after this batch."""
        self._runner = runner = TransactionRunner(
            state, self._begin, self._decide, self._after_batch
        )
        self.transaction, self.batch = runner.transaction, runner.batch
        self.failed = runner.failed
        self.guard, self.fail, self.task_ended = runner.guard, runner.fail, runner.task_ended
        self.liveness = LivenessMonitor(
            state.config.daemon.agent_timeout, state.config.daemon.heartbeat
        )
        self._events = state.events
        self._commands = CommandRunner(state, leases)
        self._alarm = Alarm(self.guard, self.clock.now, self._next_due_at, self.tick)
        self._gathered = Gathering(self.guard(self._take_gathered))
        self._plans_counted = 0

    @property
    def config(self) -> Config:
        """The current configuration."""
        return self._state.config

    @property
    def torn(self) -> bool:
        """Whether a transaction has failed, so that memory and store may differ."""
        return self._runner.torn

    # --- transactions ---

    def _begin(self, now: float) -> None:
        """Called at the beginning of a transaction."""
        if unheard_s := self.liveness.unheard_s(now):
            self._postpone_limits(unheard_s, now)

    def _decide(self, now: float) -> None:
        """Pass the events of a transaction to the controller, and carry out its commands."""
        while self._events:
            news = tuple(self._events)
            self._events.clear()
            for command in self.controller.handle_all(news, now):
                self._commands.carry_out(command, now)
        self._shares.keep(now)

    def _after_batch(self, unreached: set[bytes]) -> None:
        """Called after a batch is saved and its messages are sent."""
        if unreached:
            self._mark_unreachable(unreached)
        self._count_plans()
        self._alarm.set()

    def feed(self, event: Event) -> None:
        """Pass an event to the controller, in this transaction or one of its own."""
        with self.transaction():
            self._events.append(event)

    def tick(self) -> None:
        """Act on all time limits that have passed."""
        with self.transaction() as now:
            self.feed(Tick())
            if (due := self.curves.tell_at()) is not None and now >= due:
                self._events += self.curves.for_waiting(self._spec)
            for run in list(self.runs.values()):
                self.rounds.act(run, run.rounds.tick(now))
                if run.starting_until is not None and now >= run.starting_until:
                    self.rounds.rescale_over(run)

    # --- partitions ---

    def _postpone_limits(self, unheard_s: float, now: float) -> None:
        """Extend all time limits by the seconds in which the daemon cannot have received
        messages.
        """
        for run in self.runs.values():
            run.rounds.postpone(unheard_s)
            if run.starting_until is not None:
                run.starting_until += unheard_s
        if self.liveness.partitioned_since is not None:
            return
        self.agents.heard(now)
        if unheard_s > RECONNECT_HEARTBEATS * self.config.daemon.heartbeat and list(self.agents):
            self.recovered(f"The daemon stood still for {unheard_s:.3g} s", now)

    def partitioned(self, now: float) -> None:
        """Suspend planning: the daemon is cut off from its agents. Call it in every check during
        the partition.
        """
        if self.liveness.settling_until is None:
            count = len(list(self.agents))
            self._record_partition(f"Most of the {count} agents fell silent at one moment", now)
        self.liveness.settle(now + PARTITION_HOLD_S)
        self.controller.hold(now + PARTITION_HOLD_S)

    def recovered(self, sentence: str, now: float) -> None:
        """Wait for the agents as after a restart: the partition has ended, and they report again
        soon.
        """
        self._record_partition(sentence, now)
        back_by = now + self.config.daemon.adopt_wait  # they do not reconnect all at once
        self.agents.heard(back_by)
        self.liveness.settle(back_by, now)
        self.controller.hold(back_by)

    def _record_partition(self, sentence: str, now: float) -> None:
        self.audit.record(
            EventKind.DAEMON_PARTITIONED,
            f"{sentence}. The daemon was cut off from its agents, which are not lost. The jobs "
            "continue; the daemon waits for the agents to report again.",
        )

    def close(self) -> None:
        """Cancel all timers."""
        self._gathered.close()
        self._alarm.close()

    def _next_due_at(self) -> float | None:
        """Return when :meth:`tick` is due without an event; None if it is not."""
        times = [self.controller.next_wakeup(), self.curves.tell_at()]
        for run in self.runs.values():
            times += [run.rounds.next_wakeup(), run.starting_until]
        return min((t for t in times if t is not None), default=None)

    def _spec(self, job: str) -> messages.JobSpec | None:
        run = self.runs.get(job)
        return run.spec if run is not None else None

    def _mark_unreachable(self, peers: set[bytes]) -> None:
        for agent in self.agents:
            if agent.peer in peers and agent.unreachable_since is None:
                agent.unreachable_since = self.clock.now()
                self.unreachable(agent.node)

    def _count_plans(self) -> None:
        plan = self.controller.last_plan
        if plan is not None and self.controller.plans != self._plans_counted:
            self._plans_counted = self.controller.plans
            self.metrics.plan(plan.solve_s, plan.gap)

    # --- jobs ---

    def add(self, row: JobRow, spec: messages.JobSpec) -> ActiveJob:
        """Take over a job: a new one, or one from the store."""
        return self.add_all([(row, spec)])[0]

    def add_all(self, jobs: Sequence[tuple[JobRow, messages.JobSpec]]) -> list[ActiveJob]:
        """Take over several jobs. Their rows are read from the store together."""
        profiled = self.config.profiling.enabled
        curves = self.curves.begin([(row.id, spec) for row, spec in jobs], profiled=profiled)
        goals = self.goals.begin(jobs)
        return [
            self._add(row, spec, stored_curve, *goal)
            for (row, spec), stored_curve, goal in zip(jobs, curves, goals, strict=True)
        ]

    def _add(
        self,
        row: JobRow,
        spec: messages.JobSpec,
        stored_curve: InitialCurve,
        goals: OwnerGoals,
        progress: GoalsSoFar,
    ) -> ActiveJob:
        rounds: Rounds = ROUNDS[spec.mode](
            round_settings(self.config), spec.min_nodes, row.generation
        )
        run = ActiveJob(
            row,
            spec,
            rounds,
            JobMonitor(row.samples, row.samples_before, row.generation),
            checkpointed_at=self.clock.now(),
        )
        self.runs[row.id] = run
        curve = ScalingCurve.of((int(k), v) for k, v in spec.curve.items()) if spec.curve else None
        quotas = self.parties.quotas(spec.owner)
        max_nodes = max(spec.min_nodes, min([spec.max_nodes, *(quota.nodes for quota in quotas)]))
        sizes = spec.profile_sizes
        self.feed(
            JobSubmitted(
                row.id,
                spec.min_nodes,
                max_nodes,
                weight=spec.weight,
                goal=Goal(spec.goal),
                curve=curve,
                state=JobState(row.state),
                tries=row.tries,
                last_failure_at=row.last_broke,
                profile=spec.profile,
                profile_sizes=tuple(k for k in sizes if k <= max_nodes) or None if sizes else None,
                scaling=stored_curve.scaling,
                kind=stored_curve.kind,
                owner=self.accounts.of(spec.owner),
                goals=goals,
                progress=progress,
                party=self.parties.party(spec.owner),
                sweep=f"{spec.owner}:{spec.sweep}" if spec.sweep else "",
                exempt_from_shares=spec.deadline is not None,
                quotas=quotas,
                trainer=self.parties.trainer(spec.owner),
                node_class=spec.node_class,
            )
        )
        if not spec.trains and curve is not None:
            self.feed(CurveChanged(row.id, curve, SERVICE_COST))
        return run

    def trainer(self, user: str) -> Trainer | None:
        """Return the trainer in whose plan the user's jobs are; None if there is only one plan."""
        return self.controller.trainers.of(self.parties.trainer(user))

    def trainer_of(self, job: JobRecord) -> Trainer | None:
        """Return the trainer in whose plan a job is; None if there is only one plan."""
        return self.controller.trainers.of(job.submitted.trainer)

    def reweigh(self, job: str, spec: messages.JobSpec) -> None:
        """Change the weight of an unfinished job to that of ``spec``."""
        run = self.runs[job]
        run.spec = spec
        self.repository.save(run, spec=msgspec.json.encode(spec).decode())
        self.feed(WeightChanged(job, spec.weight))

    def revalue(self, job: str, spec: messages.JobSpec) -> None:
        """Change the values of nodes for an unfinished service or farm to those of ``spec``."""
        run = self.runs[job]
        run.spec = spec
        self.repository.save(run, spec=msgspec.json.encode(spec).decode())
        points = ((int(size), value) for size, value in (spec.curve or {}).items())
        self.feed(CurveChanged(job, ScalingCurve.of(points), SERVICE_COST))

    def progressed(self, run: ActiveJob, record: messages.Progress) -> None:
        """Pass a job's progress to the controller, at the interval of its state."""
        if not self.config.profiling.enabled:
            return
        run.counts.add_report(record)
        now = self.clock.now()
        interval_s = (
            MEASURED_EVERY_S if run.row.state == JobState.PROFILING.value else OBSERVED_EVERY_S
        )
        if (
            now - run.progress_at < interval_s
            or run.counts.generation != run.rounds.generation
            or not run.counts.advance()
        ):
            return
        run.progress_at = now
        self._gathered.progressed(
            Progressed(
                run.row.id,
                len(run.rounds.members),
                run.counts.time,
                run.counts.samples,
                run.monitor.batch,
            )
        )

    def save_soon(self, run: ActiveJob) -> None:
        """Save the job's progress together with that of other jobs."""
        self._gathered.save(run)

    def _take_gathered(self, reports: GatheredReports) -> None:
        """Handle the reports of many jobs in one transaction, because each looks at all jobs."""
        with self.transaction() as now:
            self._events += reports.progress.values()
            for job, run in reports.to_save.items():
                if self.runs.get(job) is not run:
                    continue  # it has ended
                self.repository.checkpoint(run, now)
                if (done := self.goals.progressed(run)) is not None:
                    self._events.append(done)

    def keep_rescales(self, run: ActiveJob) -> None:
        """Store the finished rescales of a job, and pass their costs to the controller."""
        for r in run.monitor.finished_rescales():
            with self.transaction():
                self.repository.rescale(run, r)
                if r.kind in RESCALE_KINDS:
                    self.feed(RescaleCostMeasured(run.row.id, r.kind, r.cost_s))

    def unreachable(self, node: str) -> None:
        """Handle an agent that cannot be reached: until it is back or lost, failures of its peers
        do not count as the job's own.
        """
        for run in self.runs.values():
            if node in run.rounds.members:
                run.rounds.unreachable(node)

    def first_sample(self, run: ActiveJob) -> None:
        """Handle the first samples of the newest round: its rescale is over."""
        if run.starting_until is not None:
            self._state.failing.works(run.spec.script, run.rounds.members)
            with self.transaction():
                self.rounds.rescale_over(run)

    # --- end and restart ---

    def keep_shares(self, now: float) -> None:
        """Store the service of all shares."""
        self._shares.keep(now, at_once=True)

    def restore(self) -> None:
        """Take over the unfinished jobs in the store. Agents report later what they run."""
        with self.transaction() as now:
            self._shares.restore(now)
            rows = self.store.list_jobs([s.value for s in JobState if not s.ended])
            jobs = [(row, decode_spec(row.spec)) for row in rows]
            started = {row.id for row, _ in jobs if row.started is not None}
            awaited = {each for row, spec in jobs if row.id not in started for each in spec.after}
            blocking = {row.id for row in not_completed(self.store, awaited)}
            self.add_all(
                [
                    (row, spec)
                    for row, spec in jobs
                    if row.id in started
                    or (blocking.isdisjoint(spec.after) and not is_arriving(self.store, row, spec))
                ]
            )
