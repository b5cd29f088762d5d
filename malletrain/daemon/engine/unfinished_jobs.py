"""Takes over jobs, new ones and those in the store, and changes them until they end.

Decides what the controller is told of a job at its start, how often it receives the progress of a
job, and how long progress reports are collected for one transaction (:class:`Gathering`): a
transaction looks at every job, and a thousand jobs report every second.
:mod:`malletrain.daemon.engine.decisions` carries out what the controller decides about them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from allocator import Goal, RescaleCost, ScalingCurve
from jpa.costs import RESCALE_KINDS
from malletrain.core.events import (
    CurveChanged,
    JobState,
    JobSubmitted,
    LimitsChanged,
    Progressed,
    RescaleCostMeasured,
    StartCostChanged,
    WeightChanged,
)
from malletrain.core.goals import GoalsSoFar, OwnerGoals
from malletrain.core.start_costs import ASSUMED_START_S
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Transactions
from malletrain.daemon.jobs.curves import InitialCurve
from malletrain.daemon.jobs.monitor import JobMonitor
from malletrain.daemon.jobs.repository import ActiveJob, decode_spec, is_arriving, not_completed
from malletrain.daemon.site.settings import ROUNDS, round_settings
from malletrain.protocol import messages
from malletrain.rounds.interface import Rounds
from malletrain.store.records import JobRow

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

    def add(self, row: JobRow, spec: messages.JobSpec) -> ActiveJob:
        """Take over a job: a new one, or one from the store."""
        return self.add_all([(row, spec)])[0]

    def add_all(self, jobs: Sequence[tuple[JobRow, messages.JobSpec]]) -> list[ActiveJob]:
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
        spec: messages.JobSpec,
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
            JobMonitor(row.samples, row.samples_before, row.generation, row.id),
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

    def _values_changed(self, job: str, spec: messages.JobSpec, curve: ScalingCurve) -> None:
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

    def reweigh(self, job: str, spec: messages.JobSpec) -> None:
        """Change the weight of an unfinished job to that of ``spec``."""
        self._respecify(job, spec)
        self._transactions.feed(WeightChanged(job, spec.weight))

    def revalue(self, job: str, spec: messages.JobSpec) -> None:
        """Change the values of nodes for an unfinished service or farm to those of ``spec``."""
        self._respecify(job, spec)
        points = ((int(size), value) for size, value in (spec.curve or {}).items())
        self._values_changed(job, spec, ScalingCurve.of(points))
        self._state.member_news.came(job)

    def relink(self, job: str, spec: messages.JobSpec) -> None:
        """Change the links of an unfinished job to those of ``spec``."""
        self._respecify(job, spec)

    def limit(self, job: str, spec: messages.JobSpec) -> None:
        """Change the limits of the scale of an unfinished job to those of ``spec``."""
        self._respecify(job, spec).rounds.min_nodes = spec.min_nodes
        self._transactions.feed(LimitsChanged(job, spec.min_nodes, spec.max_nodes))

    def extend(self, job: str, goals: OwnerGoals, *, stated: bool) -> None:
        """Change the goals of an unfinished job. ``stated``: whether its owner stated its work."""
        self._transactions.feed(self._state.goals.extend(job, goals, stated=stated))

    def _respecify(self, job: str, spec: messages.JobSpec) -> ActiveJob:
        """Replace the specification of a job."""
        run = self._state.runs[job]
        run.spec = spec
        self._state.repository.save(run, spec=msgspec.json.encode(spec).decode())
        return run

    def progressed(self, run: ActiveJob, record: messages.Progress) -> None:
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
