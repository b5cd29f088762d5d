"""The goals of jobs in the daemon: read from and written to the store, passed to the controller,
shown to clients.

Decides what is stored and what clients see. :mod:`malletrain.core.goal_keeper` decides how a job
stands with its goal and what follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from malletrain.core.controller import Controller
from malletrain.core.events import Event, JobState
from malletrain.core.goal_record import GoalRecord
from malletrain.core.goal_standing import more_nodes_help
from malletrain.core.goals import GoalsChanged, GoalsSoFar, GoalStanding, OwnerGoals, WorkReported
from malletrain.core.node_history import MAX_SPANS, SPAN_S, NodeHistory, NodeSpan
from malletrain.core.past_forecasts import Ended, Made
from malletrain.daemon.clock import Clock
from malletrain.daemon.job_repository import ActiveJob
from malletrain.daemon.metrics import Metrics
from malletrain.protocol import messages
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import GoalView
from malletrain.store.records import GoalRow, JobRow, NodeSpanRow
from malletrain.store.store import Store

HOUR_S = 3600.0
RECALLED_S = 60 * 86400.0
"""Forecasts older than this are left to the past when the daemon starts."""
KEEP_EVERY_S = 5.0
"""How often what jobs are charged is written down."""
YEAR_S = 366 * 86400.0
LATEST_S, MOST_NH, MOST_WORK = 100 * YEAR_S, 1e12, 1e15
"""Bounds of a deadline (seconds from now), a budget and the work. What would end later than a
deadline can be, never does.
"""


def goals_problem(goals: OwnerGoals, mode: str, now: float) -> str:
    """What is wrong with the goals of a job, as a sentence; empty: nothing."""
    if goals.deadline is not None and not now < goals.deadline:
        return "The job's deadline is over already; give a time to come."
    if goals.deadline is not None and not goals.deadline < now + LATEST_S:
        return (
            f"The job's deadline is more than {LATEST_S / YEAR_S:.0f} years ahead; give a nearer "
            "one, or none."
        )
    if goals.budget_s is not None and not 0 < goals.budget_s <= MOST_NH * HOUR_S:
        return "The job's budget is no number of node-hours above 0; give one such as 200nh."
    if goals.work is not None and not 0 < goals.work <= MOST_WORK:
        return f"The job's work is no number of samples above 0 and up to {MOST_WORK:g}."
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
        self._recall_forecasts(now)

    def _recall_forecasts(self, now: float) -> None:
        """Let the controller know what came of the forecasts of before: the audit log says when a
        job's first was made, its row when it ended.
        """
        firsts = {
            event.job: Made(*event.data["first"])
            for event in self._store.events_of(EventKind.GOAL_STANDING, now - RECALLED_S)
            if "first" in event.data
        }
        over, unfinished = [], {}
        rows = self._store.many.jobs(firsts)
        for job, made in firsts.items():
            row = rows.get(job)
            if row is None:
                continue
            if row.ended is None:
                unfinished[job] = made
            else:
                over.append(Ended(made, row.ended, row.state == JobState.COMPLETED))
        over.sort(key=lambda each: each.at)
        self._keeper.past.restore(over, unfinished)

    def too_small(self, budget_nh: float | None, min_nodes: int) -> str:
        """Why a job with this budget would never get nodes, as a sentence; empty: it can."""
        least = self._keeper.least_budget_s(min_nodes) / HOUR_S
        if budget_nh is None or budget_nh * (1 + 1e-9) >= least:
            return ""
        return (
            f"A budget of {budget_nh:.4g} node-hours is too small to start the job: it needs "
            f"{min_nodes} node{'' if min_nodes == 1 else 's'}, and is given none unless the budget "
            f"lasts for the time that a plan looks ahead, {math.ceil(least * 1000) / 1000:g} "
            "node-hours. Give that at least, or none."
        )

    # --- jobs ---

    def begin(
        self, jobs: Sequence[tuple[JobRow, messages.JobSpec]]
    ) -> list[tuple[OwnerGoals, GoalsSoFar]]:
        """What the controller is told of jobs that are new, or that the store knows."""
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
        """What the controller is told of a job's progress; None: it need not know."""
        if run.row.id not in self._keeper.records:
            return None
        return WorkReported(run.row.id, run.monitor.total)

    def work_left(self, run: ActiveJob, facts: Mapping[str, Any]) -> list[Event]:
        """The job's sampler says how much work is left."""
        remaining, generation = facts.get("left"), facts.get("generation")
        row = self._store.goals.of(run.row.id) or GoalRow(run.row.id)
        if row.stated or generation != run.rounds.generation:
            return []
        if not isinstance(remaining, int | float) or not 0 <= remaining <= MOST_WORK:
            return []
        work = run.monitor.total + float(remaining)
        goals = OwnerGoals(row.deadline, row.budget_s, work)
        self._store.goals.put(replace(row, work=work))
        return [
            GoalsChanged(run.row.id, goals),
            WorkReported(run.row.id, run.monitor.total),
        ]

    def extend(self, job: str, goals: OwnerGoals, *, stated: bool) -> GoalsChanged:
        """The owner wants these goals from now on. ``stated``: the work is the owner's word."""
        self._put(job, goals, stated=stated)
        return GoalsChanged(job, goals)

    def of(self, job: str) -> tuple[OwnerGoals, bool]:
        """The goals of a job, and whether its work is the owner's word."""
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
        """It stands so with the job's goals now: what the controller announced."""
        if (row := self._store.goals.of(job)) is not None:
            charged_s = HOUR_S * float(data["charged_nh"])
            now = self._clock.now()
            self._store.goals.put(
                replace(row, standing=data["standing"], charged_s=charged_s, charged_at=now)
            )

    def charge(self, job: str) -> None:
        """Write down what the job was charged until now; call it within a step, and in the one in
        which its nodes change.
        """
        record, now = self._keeper.records.get(job), self._clock.now()
        if record is None or record.goals.budget_s is None:
            return
        row, charged_s = self._store.goals.of(job), record.account.charged(now)
        if row is not None and (record.account.holds or charged_s != row.charged_s):
            self._store.goals.put(replace(row, charged_s=charged_s, charged_at=now))

    # --- now and then ---

    def keep(self, *, at_once: bool = False) -> None:
        """Write down what jobs are charged and how many nodes there were, when it is time to or
        ``at_once``; call it within a step.
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
        self._tell_metrics(now)

    def _tell_metrics(self, now: float) -> None:
        standings: dict[str, int] = {}
        slack, remaining = {}, {}
        for job, record in self._keeper.records.items():
            if record.standing is not None:
                word = record.standing.value
                standings[word] = standings.get(word, 0) + 1
            deadline, seen, budget_s = record.goals.deadline, record.forecast, record.goals.budget_s
            if deadline is not None and seen is not None and math.isfinite(seen.end):
                slack[job] = deadline - seen.end
            if budget_s is not None:
                remaining[job] = budget_s - record.account.charged(now)
        helpable = sum(more_nodes_help(record, now) for record in self._keeper.records.values())
        self._metrics.goals(standings, slack, remaining, helpable)

    # --- what is shown ---

    @property
    def history(self) -> NodeHistory:
        """The nodes that there were of late."""
        return self._keeper.history

    def rows(self) -> dict[str, GoalRow]:
        """The goals of all jobs."""
        return self._store.goals.all()

    def row(self, job: str) -> GoalRow | None:
        """The goals of a job."""
        return self._store.goals.of(job)

    def view(self, job: str, row: GoalRow | None) -> GoalView | None:
        """How it stands with a job's goals; None: it has none, and its work is not known."""
        if row is None:
            return None
        record, now = self._keeper.records.get(job), self._clock.now()
        charged_s = record.account.charged(now) if record and row.budget_s else row.charged_s
        seen = record.forecast if record else None
        return GoalView(
            row.deadline,
            None if row.budget_s is None else row.budget_s / HOUR_S,
            charged_s / HOUR_S,
            row.work,
            row.standing,
            _finite(seen.end, now) if seen else None,
            _finite(seen.low, now) if seen else None,
            _finite(seen.high, now) if seen else None,
            seen.hours if seen else 0.0,
            _why(record, now) if record else "",
        )


def _finite(at: float, now: float) -> float | None:
    """JSON knows no infinity, and no calendar the year 10^12."""
    return at if at < now + LATEST_S else None


def _why(record: GoalRecord, now: float) -> str:
    """Why there is no forecast, as a sentence; empty where there is one."""
    if record.job.halted:
        return "The budget is spent; malletrain extend lets the job go on."
    if record.goals.work is None:
        return (
            "When it ends can be said once it is known how much work there is: --work SAMPLES, or "
            "sampler.epochs(N) of malletrain.ElasticSampler."
        )
    if record.forecast is None:
        return "When it ends can be said once its speed is known."
    if _finite(record.forecast.end, now) is None:
        return "With the nodes that there were of late it does not end."
    return ""
