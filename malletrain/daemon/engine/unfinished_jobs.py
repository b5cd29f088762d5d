"""Takes over jobs, new ones and those in the store, and changes them until they end.

Decides what the controller is told of a job at its start, how often it receives the progress of a
job, and how long progress reports are collected for one transaction (:class:`Gathering`): a
transaction looks at every job, and a thousand jobs report every second.
:mod:`malletrain.daemon.engine.decisions` carries out what the controller decides about them.

:class:`JobDependencies` decides when a job that waits for others (``--after``) starts or is
cancelled because a job before it did not complete, and when a job reaches its time limit
(``--time-limit``). All of it follows from stored jobs and events, so a restart of the daemon loses
nothing.

:class:`ServiceValues` are what nodes are worth to services, as their processes and owners state it
at run time. A value may lapse: then the last values without such a limit apply again, so that a
service whose dispatcher has died does not hold nodes for ever. The bid is stored in the job's
specification.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from allocator import Goal, RescaleCost, ScalingCurve
from jpa.costs import RESCALE_KINDS
from malletrain.config.units import show_duration
from malletrain.core.change_costs import ASSUMED_START_S
from malletrain.core.events import (
    CurveChanged,
    JobCancelled,
    JobState,
    JobSubmitted,
    LimitsChanged,
    Progressed,
    RescaleCostMeasured,
    StartCostChanged,
    WeightChanged,
)
from malletrain.core.goals import GoalsSoFar, OwnerGoals
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Transactions
from malletrain.daemon.jobs.curves import InitialCurve
from malletrain.daemon.jobs.monitor import JobMonitor
from malletrain.daemon.jobs.repository import ActiveJob, decode_spec, is_arriving, not_completed
from malletrain.daemon.site.settings import ROUNDS, round_settings
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.messages import JobSpec, Progress
from malletrain.rounds.interface import Rounds
from malletrain.store.records import EventRow, JobRow

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
    """Collects the reports of one daemon. ``take``: called with them, from the loop."""

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
SERVICE_COST = RescaleCost(up_s=1.0, down_s=1.0, start_s=ASSUMED_START_S)
"""Rescale costs of a service and of a farm, seconds. They do not stop: joiners start next to the
others, and leavers hand over what they hold. The costs are above 0 so that plans do not swap nodes
without a benefit.
"""


class UnfinishedJobs:
    """The unfinished jobs of one daemon. Create it within the loop in which it runs.

    Args:
        state: the daemon's state.
        transactions: saves what follows for a job.
    """

    def __init__(self, state: SiteState, transactions: Transactions) -> None:
        self._state = state
        self._transactions = transactions
        self._gathered = Gathering(transactions.guard(self._take_gathered))

    def close(self) -> None:
        """Cancel the timer. Collected reports are dropped."""
        self._gathered.close()

    def add(self, row: JobRow, spec: JobSpec) -> ActiveJob:
        """Take over a job: a new one, or one from the store."""
        return self.add_all([(row, spec)])[0]

    def add_all(self, jobs: Sequence[tuple[JobRow, JobSpec]]) -> list[ActiveJob]:
        """Take over several jobs. Their rows are read from the store together."""
        state = self._state
        profiled = state.config.profiling.enabled
        curves = state.curves.begin([(row.id, spec) for row, spec in jobs], profiled=profiled)
        goals = state.goals.begin(jobs)
        return [
            self._add(row, spec, stored_curve, *goal)
            for (row, spec), stored_curve, goal in zip(jobs, curves, goals, strict=True)
        ]

    def _add(
        self,
        row: JobRow,
        spec: JobSpec,
        stored_curve: InitialCurve,
        goals: OwnerGoals,
        progress: GoalsSoFar,
    ) -> ActiveJob:
        state = self._state
        rounds: Rounds = ROUNDS[spec.mode](
            round_settings(state.config), spec.min_nodes, row.generation
        )
        run = ActiveJob(
            row,
            spec,
            rounds,
            JobMonitor(row.id, row.samples, row.samples_before, row.generation),
            checkpointed_at=state.clock.now(),
        )
        run.tuner = state.layouts.restore(row.id, spec)
        state.runs[row.id] = run
        curve = ScalingCurve.of((int(k), v) for k, v in spec.curve.items()) if spec.curve else None
        quotas = state.parties.quotas(spec.owner)
        max_nodes = max(spec.min_nodes, min([spec.max_nodes, *(quota.nodes for quota in quotas)]))
        sizes = spec.profile_sizes
        self._transactions.feed(
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
                owner=state.accounts.of(spec.owner),
                goals=goals,
                progress=progress,
                party=state.parties.party(spec.owner),
                sweep=f"{spec.owner}:{spec.sweep}" if spec.sweep else "",
                exempt_from_shares=spec.deadline is not None,
                quotas=quotas,
                trainer=state.parties.trainer(spec.owner),
                node_class=spec.node_class,
                seeks_layout=bool(spec.tuned) and not (run.tuner and run.tuner.is_announced),
            )
        )
        if not spec.trains and curve is not None:
            self._values_changed(row.id, spec, curve)
        start = state.repository.start_cost(row.id, spec)
        if spec.mode == "service" and start is not None:
            self._transactions.feed(StartCostChanged(row.id, start))
        state.member_news.came(row.id)
        return run

    def _values_changed(self, job: str, spec: JobSpec, curve: ScalingCurve) -> None:
        # A farm may run its last tasks again on nodes that have none.
        returns_useless = spec.mode == "service"
        self._transactions.feed(CurveChanged(job, curve, SERVICE_COST, returns_useless))

    def restore(self) -> None:
        """Take over the unfinished jobs in the store. Agents report later what they run."""
        state = self._state
        with self._transactions.begin() as now:
            state.shares.restore(now)
            rows = state.store.list_jobs([s.value for s in JobState if not s.ended])
            jobs = [(row, decode_spec(row.spec)) for row in rows]
            started = {row.id for row, _ in jobs if row.started is not None}
            awaited = {each for row, spec in jobs if row.id not in started for each in spec.after}
            blocking = {row.id for row in not_completed(state.store, awaited)}
            self.add_all(
                [
                    (row, spec)
                    for row, spec in jobs
                    if row.id in started
                    or (blocking.isdisjoint(spec.after) and not is_arriving(state.store, row, spec))
                ]
            )

    def reweigh(self, job: str, spec: JobSpec) -> None:
        """Change the weight of an unfinished job to that of ``spec``."""
        self._respecify(job, spec)
        self._transactions.feed(WeightChanged(job, spec.weight))

    def revalue(self, job: str, spec: JobSpec) -> None:
        """Change the values of nodes for an unfinished service or farm to those of ``spec``."""
        self._respecify(job, spec)
        points = ((int(size), value) for size, value in (spec.curve or {}).items())
        self._values_changed(job, spec, ScalingCurve.of(points))
        self._state.member_news.came(job)

    def relink(self, job: str, spec: JobSpec) -> None:
        """Change the links of an unfinished job to those of ``spec``."""
        self._respecify(job, spec)

    def limit(self, job: str, spec: JobSpec) -> None:
        """Change the limits of the scale of an unfinished job to those of ``spec``."""
        self._respecify(job, spec).rounds.min_nodes = spec.min_nodes
        self._transactions.feed(LimitsChanged(job, spec.min_nodes, spec.max_nodes))

    def extend(self, job: str, goals: OwnerGoals, *, stated: bool) -> None:
        """Change the goals of an unfinished job. ``stated``: whether its owner stated its work."""
        self._transactions.feed(self._state.goals.extend(job, goals, stated=stated))

    def _respecify(self, job: str, spec: JobSpec) -> ActiveJob:
        """Replace the specification of a job."""
        run = self._state.runs[job]
        run.spec = spec
        self._state.repository.save(run, spec=msgspec.json.encode(spec).decode())
        return run

    def progressed(self, run: ActiveJob, record: Progress) -> None:
        """Pass a job's progress to the search for its layout, and to the controller at the interval
        of the job's state.
        """
        if self._state.layouts.measure(run, record):
            with self._transactions.begin():
                self._state.layouts.follow(run)
        if not self._state.config.profiling.enabled:
            return
        run.counts.add_report(record)
        now = self._state.clock.now()
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
        state = self._state
        with self._transactions.begin() as now:
            state.events += reports.progress.values()
            for job, run in reports.to_save.items():
                if state.runs.get(job) is not run:
                    continue  # it has ended
                state.repository.checkpoint(run, now)
                if (done := state.goals.progressed(run)) is not None:
                    state.events.append(done)

    def keep_rescales(self, run: ActiveJob) -> None:
        """Store the finished rescales of a job, and pass their costs to the controller."""
        for r in run.monitor.finished_rescales():
            with self._transactions.begin():
                self._state.repository.rescale(r)
                if r.kind in RESCALE_KINDS:
                    self._transactions.feed(RescaleCostMeasured(run.row.id, r.kind, r.cost_s))

    def first_sample(self, run: ActiveJob) -> None:
        """Handle the first samples of the newest round: its rescale is over."""
        if run.starting_until is not None:
            self._state.failing.works(run.spec.script, run.rounds.members)
            with self._transactions.begin():
                self._state.rounds.rescale_over(run)


NODE_EVENTS = (EventKind.JOB_STARTED, EventKind.JOB_SUSPENDED)
"""Kinds of the events at which a job gets nodes and loses its last ones."""


def running_s(events: Iterable[EventRow], now: float) -> float:
    """Return for how long a job has had nodes.

    Args:
        events: the job's events of the kinds :data:`NODE_EVENTS`, oldest first.
        now: time, seconds.

    Returns:
        Seconds.
    """
    total, started_at = 0.0, None
    for event in events:
        if event.kind == EventKind.JOB_STARTED:
            started_at = event.time if started_at is None else started_at
        elif started_at is not None:
            total, started_at = total + event.time - started_at, None
    return total if started_at is None else total + max(0.0, now - started_at)


class JobDependencies:
    """Manages the jobs that wait for others and those with a time limit."""

    def __init__(self, state: SiteState, transactions: Transactions, jobs: UnfinishedJobs) -> None:
        self._state = state
        self._transactions = transactions
        self._jobs = jobs
        self._waiting: set[str] | None = None
        self._running_s: dict[str, float] = {}
        """Job with a time limit → time for which it has had nodes, seconds."""
        self._checked = 0.0

    def submitted(self, row: JobRow) -> None:
        """Start a newly stored job, or let it wait for others. Call it within a transaction."""
        spec = decode_spec(row.spec)
        if open_jobs := not_completed(self._state.store, spec.after):
            named = ", ".join(f"{job.id} ({job.name})" for job in open_jobs)
            self._state.store.update_job(row.id, reason=f"begins when {named} completed")
            self._waiting_jobs().add(row.id)
        else:
            self._jobs.add(row, spec)

    def waits(self, job: str) -> bool:
        """Whether the job waits for others to complete."""
        return job in self._waiting_jobs()

    def cancel(self, job: str, reason: str) -> None:
        """Cancel a job that waits for others, or for its tasks. Call it within a transaction."""
        state, cancelled = self._state, JobState.CANCELLED.value
        state.store.update_job(job, state=cancelled, reason=reason, ended=state.clock.now())
        state.audit.record(EventKind.JOB_CANCELLED, f"The job was cancelled: {reason}.", job=job)
        state.metrics.job_ended(job, cancelled)
        state.news.came(job)
        self._waiting_jobs().discard(job)

    def check(self) -> None:
        """Start or cancel the jobs that are due. Call it regularly."""
        for job in sorted(self._waiting_jobs()):
            self._check_job(job)
        self._check_limits()

    def _waiting_jobs(self) -> set[str]:
        """Return the ids of the jobs that wait for others. After a restart they are read from the
        store.
        """
        if self._waiting is None:
            queued = self._state.store.list_jobs([JobState.QUEUED.value])
            rows = [(row, decode_spec(row.spec)) for row in queued]
            self._waiting = {
                row.id
                for row, spec in rows
                if row.id not in self._state.runs
                and spec.after
                and not is_arriving(self._state.store, row, spec)
            }
        return self._waiting

    def _check_job(self, job: str) -> None:
        state = self._state
        row = state.store.get_job(job)
        if row is None:
            return
        spec = decode_spec(row.spec)
        open_jobs = not_completed(state.store, spec.after)
        ended = [other for other in open_jobs if JobState(other.state).ended]
        if ended:
            first = ended[0]
            with self._transactions.begin():
                self.cancel(
                    job,
                    f"job {first.id} ({first.name}), after which it was to begin, {outcome(first)}",
                )
        elif not open_jobs:
            with self._transactions.begin():
                self._waiting_jobs().discard(job)
                self._jobs.add(state.store.update_job(job, reason=""), spec)

    def _check_limits(self) -> None:
        state, now = self._state, self._state.clock.now()
        passed_s, self._checked = now - (self._checked or now), now
        limited = {job: run for job, run in state.runs.items() if run.spec.time_limit_s}
        self._running_s = {job: time for job, time in self._running_s.items() if job in limited}
        for job, run in limited.items():
            if job not in self._running_s:
                self._running_s[job] = running_s(state.store.job_events(job, NODE_EVENTS), now)
            elif run.row.planned_nodes:
                self._running_s[job] += passed_s
            if self._running_s[job] >= run.spec.time_limit_s:
                limit = show_duration(run.spec.time_limit_s)
                self._transactions.feed(JobCancelled(job, f"its time limit of {limit} is over"))


def outcome(job: JobRow) -> str:
    """Return the outcome of an ended job, as words of a sentence."""
    return "was cancelled" if job.state == JobState.CANCELLED.value else job.state


MAX_SIZES_NAMED = 4
"""Maximum number of sizes that a sentence names."""


class ServiceValues:
    """The values of nodes for the services of one daemon.

    Args:
        state: the daemon's state.
        transactions: saves changes.
        jobs: changes unfinished jobs.
    """

    def __init__(self, state: SiteState, transactions: Transactions, jobs: UnfinishedJobs) -> None:
        self._state = state
        self._transactions = transactions
        self._jobs = jobs

    def set(self, run: ActiveJob, spec: JobSpec, expires_s: float | None, user: str = "") -> str:
        """Set the values of nodes for a service. Call it within a transaction.

        Args:
            run: the service.
            spec: its specification with the new values
                (:func:`malletrain.daemon.jobs.admission.valued`).
            expires_s: time after which they lapse unless they are set again, seconds; None: never.
            user: user who states them, for the audit log; empty for a process of the service.

        Returns:
            What the values are now, as a sentence.
        """
        before = run.row.values_until
        lasting = dict(run.row.lasting_values) if before is not None else run.spec.curve or {}
        if expires_s is None:
            until, lasting = None, {}
        else:
            until = self._state.clock.now() + expires_s
        changed = spec.curve != run.spec.curve
        sentence = values_sentence(spec, expires_s)
        if user and (changed or (until is None) != (before is None)):
            self._state.audit.record(
                EventKind.NODES_VALUED,
                sentence,
                job=run.row.id,
                by=user,
                values=spec.curve,
                expires_s=expires_s,
            )
        if changed:
            self._jobs.revalue(run.row.id, spec)
        if changed or until != before or lasting != run.row.lasting_values:
            self._state.repository.save(run, values_until=until, lasting_values=lasting)
        return sentence

    def expire(self, now: float) -> None:
        """Let values lapse whose time is over. Call it about every half second."""
        for run in list(self._state.runs.values()):
            until = run.row.values_until
            if until is None or now < until:
                continue
            with self._transactions.begin():
                spec = msgspec.structs.replace(run.spec, curve=dict(run.row.lasting_values))
                sentence = "They were not renewed in time. " + values_sentence(spec, None)
                self._state.audit.record(
                    EventKind.VALUES_LAPSED, sentence, job=run.row.id, values=spec.curve
                )
                self._jobs.revalue(run.row.id, spec)
                self._state.repository.save(run, values_until=None, lasting_values={})


def values_sentence(spec: JobSpec, expires_s: float | None) -> str:
    """Return what nodes are worth to a service, as sentences.

    Args:
        spec: its specification.
        expires_s: time after which the values lapse, seconds; None: never.
    """
    pairs = sorted((int(nodes), value) for nodes, value in (spec.curve or {}).items())
    if not any(value for _, value in pairs):
        sentence = "Nodes are worth nothing to the service; it gives all of them back."
    else:
        named = [f"{nodes} at {value:g}" for nodes, value in pairs]
        if len(named) > MAX_SIZES_NAMED:
            named = [*named[: MAX_SIZES_NAMED - 1], "…", named[-1]]
        sentence = f"Numbers of nodes are valued so: {', '.join(named)}."
    if expires_s is not None:
        sentence += f" The values lapse in {expires_s:g} s unless they are set again."
    return sentence
