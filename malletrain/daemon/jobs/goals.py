"""Reads and writes the goals of jobs in the store, passes them to the controller, and shows them to
clients.

Decides what is stored and what clients see. :mod:`malletrain.core.goal_keeper` decides the standing
of a job's goals and what follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from malletrain.core.controller import Controller
from malletrain.core.events import Event, JobState
from malletrain.core.forecast import MAX_SPANS, SPAN_S, Ended, Made, NodeHistory, NodeSpan
from malletrain.core.goal_record import GoalRecord, more_nodes_help
from malletrain.core.goals import GoalsChanged, GoalsSoFar, GoalStanding, OwnerGoals, WorkReported
from malletrain.daemon.jobs.repository import ActiveJob
from malletrain.daemon.site.clock import Clock
from malletrain.daemon.site.metrics import Metrics
from malletrain.protocol import messages
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import GoalView
from malletrain.store.records import GoalRow, JobRow, NodeSpanRow
from malletrain.store.store import Store

HOUR_S = 3600.0
MAX_FORECAST_AGE_S = 60 * 86400.0
"""Maximum age of the forecasts that are loaded at the daemon's start, seconds."""
KEEP_EVERY_S = 5.0
"""Interval at which the charges of jobs are stored, seconds."""
YEAR_S = 366 * 86400.0
MAX_DEADLINE_S, MAX_BUDGET_NH, MAX_WORK = 100 * YEAR_S, 1e12, 1e15
"""Maximum deadline (seconds from now), budget (node-hours) and work (samples). A job whose end is
forecast beyond the maximum deadline counts as never ending.
"""


def goals_problem(goals: OwnerGoals, mode: str, now: float) -> str:
    """Return what is wrong with the goals of a job, as a sentence; empty if they are valid.

    Args:
        goals: goals of the job.
        mode: mode of the job, such as ``"service"``.
        now: time, seconds.
    """
    if goals.deadline is not None and not now < goals.deadline:
        return "The job's deadline has passed already; give a future time."
    if goals.deadline is not None and not goals.deadline < now + MAX_DEADLINE_S:
        return (
            f"The job's deadline is more than {MAX_DEADLINE_S / YEAR_S:.0f} years ahead; give a "
            "nearer one, or none."
        )
    if goals.budget_s is not None and not 0 < goals.budget_s <= MAX_BUDGET_NH * HOUR_S:
        return "The job's budget is no number of node-hours above 0; give one such as 200nh."
    if goals.work is not None and not 0 < goals.work <= MAX_WORK:
        return f"The job's work is no number of samples above 0 and up to {MAX_WORK:g}."
    if mode == "service" and (goals.deadline is not None or goals.work is not None):
        return "A service has no end, so that it can have a budget but no deadline and no work."
    return ""


class JobGoals:
    """The goals of one daemon's jobs."""

    def __init__(
        self, store: Store, clock: Clock, controller: Controller, metrics: Metrics
    ) -> None:
        self._store = store
        self._clock = clock
        self._keeper = controller.goals
        self._metrics = metrics
        self._saved_at = -math.inf
        now = clock.now()
        spans = store.goals.spans(now - MAX_SPANS * SPAN_S)
        self._keeper.history.restore(NodeSpan(s.began, s.node_class, s.nodes) for s in spans)
        self._restore_forecasts(now)

    def _restore_forecasts(self, now: float) -> None:
        """Pass the outcome of earlier forecasts to the controller. The audit log has the time of a
        job's first forecast, its row the time of its end.
        """
        first_forecasts = {
            event.job: Made(*event.data["first"])
            for event in self._store.events_of(EventKind.GOAL_STANDING, now - MAX_FORECAST_AGE_S)
            if "first" in event.data
        }
        ended, unfinished = [], {}
        rows = self._store.many.jobs(first_forecasts)
        for job, forecast in first_forecasts.items():
            row = rows.get(job)
            if row is None:
                continue
            if row.ended is None:
                unfinished[job] = forecast
            else:
                ended.append(Ended(forecast, row.ended, row.state == JobState.COMPLETED))
        ended.sort(key=lambda each: each.at)
        self._keeper.past.restore(ended, unfinished)

    def too_small(self, budget_nh: float | None, min_nodes: int, node_class: str) -> str:
        """Return why a job with this budget would never get nodes, as a sentence; empty if it can
        get nodes.

        Args:
            budget_nh: its budget, node-hours; None: it has none.
            min_nodes: its minimum number of nodes.
            node_class: class of nodes that it asks for; empty: any.
        """
        min_budget_nh = self._keeper.least_budget_s(min_nodes, node_class) / HOUR_S
        if budget_nh is None or budget_nh * (1 + 1e-9) >= min_budget_nh:
            return ""
        return (
            f"A budget of {budget_nh:.4g} node-hours is too small to start the job: it needs "
            f"{min_nodes} node{'' if min_nodes == 1 else 's'}, and gets none unless the budget "
            "lasts for the time that a plan looks ahead, "
            f"{math.ceil(min_budget_nh * 1000) / 1000:g} node-hours. Give at least that, or "
            "no budget."
        )

    # --- jobs ---

    def begin(
        self, jobs: Sequence[tuple[JobRow, messages.JobSpec]]
    ) -> list[tuple[OwnerGoals, GoalsSoFar]]:
        """Return the goals and the progress with which each of the jobs starts in the
        controller.
        """
        rows = self._store.many.goals(row.id for row, _ in jobs)
        return [self._begin(row, spec, rows.get(row.id)) for row, spec in jobs]

    def _begin(
        self, row: JobRow, spec: messages.JobSpec, stored: GoalRow | None
    ) -> tuple[OwnerGoals, GoalsSoFar]:
        if stored is None:
            budget_s = None if spec.budget_nh is None else spec.budget_nh * HOUR_S
            goals = OwnerGoals(spec.deadline, budget_s, spec.work)
            if goals != OwnerGoals():
                self._put(row.id, goals, stated=spec.work is not None)
            return goals, GoalsSoFar(row.samples)
        goals = OwnerGoals(stored.deadline, stored.budget_s, stored.work)
        standing = GoalStanding(stored.standing) if stored.standing else None
        return goals, GoalsSoFar(row.samples, stored.charged_s, stored.charged_at, standing)

    def progressed(self, run: ActiveJob) -> WorkReported | None:
        """Return the event of a job's progress for the controller; None if the job has no goals."""
        if run.row.id not in self._keeper.records:
            return None
        return WorkReported(run.row.id, run.monitor.total)

    def work_left(self, run: ActiveJob, facts: Mapping[str, Any]) -> list[Event]:
        """Store the remaining work that a job's sampler reports. Return the events for the
        controller.
        """
        remaining, generation = facts.get("left"), facts.get("generation")
        row = self._store.goals.of(run.row.id) or GoalRow(run.row.id)
        if row.stated or generation != run.rounds.generation:
            return []
        if not isinstance(remaining, int | float) or not 0 <= remaining <= MAX_WORK:
            return []
        work = run.monitor.total + float(remaining)
        goals = OwnerGoals(row.deadline, row.budget_s, work)
        self._store.goals.put(replace(row, work=work))
        return [
            GoalsChanged(run.row.id, goals),
            WorkReported(run.row.id, run.monitor.total),
        ]

    def extend(self, job: str, goals: OwnerGoals, *, stated: bool) -> GoalsChanged:
        """Store new goals of a job. ``stated``: whether the owner stated the work. Return the
        event for the controller.
        """
        self._put(job, goals, stated=stated)
        return GoalsChanged(job, goals)

    def of(self, job: str) -> tuple[OwnerGoals, bool]:
        """Return the goals of a job, and whether its owner stated the work."""
        row = self._store.goals.of(job) or GoalRow(job)
        return OwnerGoals(row.deadline, row.budget_s, row.work), bool(row.stated)

    def _put(self, job: str, goals: OwnerGoals, *, stated: bool) -> None:
        row = self._store.goals.of(job) or GoalRow(job)
        self._store.goals.put(
            replace(
                row,
                deadline=goals.deadline,
                budget_s=goals.budget_s,
                work=goals.work,
                stated=int(stated),
            )
        )

    def stands(self, job: str, data: Mapping[str, Any]) -> None:
        """Store the standing of a job's goals. ``data``: data of the controller's announcement."""
        if (row := self._store.goals.of(job)) is not None:
            charged_s = HOUR_S * float(data["charged_nh"])
            now = self._clock.now()
            self._store.goals.put(
                replace(row, standing=data["standing"], charged_s=charged_s, charged_at=now)
            )

    def charge(self, job: str) -> None:
        """Store what the job has been charged. Call it within a transaction, and in the one in
        which the job's nodes change.
        """
        record, now = self._keeper.records.get(job), self._clock.now()
        if record is None or record.goals.budget_s is None:
            return
        row, charged_s = self._store.goals.of(job), record.account.charged(now)
        if row is not None and (record.account.holds or charged_s != row.charged_s):
            self._store.goals.put(replace(row, charged_s=charged_s, charged_at=now))

    # --- periodically ---

    def keep(self, *, at_once: bool = False) -> None:
        """Store the charges of jobs and the number of nodes, at most every ``KEEP_EVERY_S`` unless
        ``at_once``. Call it within a transaction.
        """
        now = self._clock.now()
        if now < self._saved_at + KEEP_EVERY_S and not at_once:
            return
        self._saved_at = now
        for job in self._keeper.records:
            self.charge(job)
        if spans := self._keeper.history.fresh():
            rows = (NodeSpanRow(*span) for span in spans)
            self._store.goals.put_spans(rows, now - 2 * MAX_SPANS * SPAN_S)
        self._update_metrics(now)

    def _update_metrics(self, now: float) -> None:
        standings: dict[str, int] = {}
        slack, remaining = {}, {}
        for job, record in self._keeper.records.items():
            if record.standing is not None:
                word = record.standing.value
                standings[word] = standings.get(word, 0) + 1
            deadline, forecast, budget_s = (
                record.goals.deadline,
                record.forecast,
                record.goals.budget_s,
            )
            if deadline is not None and forecast is not None and math.isfinite(forecast.end):
                slack[job] = deadline - forecast.end
            if budget_s is not None:
                remaining[job] = budget_s - record.account.charged(now)
        helpable = sum(more_nodes_help(record, now) for record in self._keeper.records.values())
        self._metrics.goals(standings, slack, remaining, helpable)

    # --- views ---

    @property
    def history(self) -> NodeHistory:
        """The recent numbers of nodes."""
        return self._keeper.history

    def view(self, job: str, row: GoalRow | None) -> GoalView | None:
        """Return the view of a job's goals; None if it has none and its work is not known."""
        if row is None:
            return None
        record, now = self._keeper.records.get(job), self._clock.now()
        charged_s = record.account.charged(now) if record and row.budget_s else row.charged_s
        forecast = record.forecast if record else None
        return GoalView(
            row.deadline,
            None if row.budget_s is None else row.budget_s / HOUR_S,
            charged_s / HOUR_S,
            row.work,
            row.standing,
            _finite(forecast.end, now) if forecast else None,
            _finite(forecast.low, now) if forecast else None,
            _finite(forecast.high, now) if forecast else None,
            forecast.hours if forecast else 0.0,
            _no_forecast_reason(record, now) if record else "",
        )


def _finite(at: float, now: float) -> float | None:
    """Return ``at``; None if it is beyond the maximum deadline, because JSON has no infinity."""
    return at if at < now + MAX_DEADLINE_S else None


def _no_forecast_reason(record: GoalRecord, now: float) -> str:
    """Return why there is no forecast, as a sentence; empty if there is one."""
    if record.job.halted:
        return "The budget is spent; malletrain extend lets the job continue."
    if record.goals.work is None:
        return (
            "The end can be forecast once the amount of work is known: --work SAMPLES, or "
            "sampler.epochs(N) of malletrain.ElasticSampler."
        )
    if record.forecast is None:
        return "The end can be forecast once the job's speed is known."
    if _finite(record.forecast.end, now) is None:
        return "With the nodes that were available lately it does not end."
    return ""
