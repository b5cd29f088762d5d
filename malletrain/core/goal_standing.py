"""Evaluates whether a job meets its deadline and budget. Pure.

Decides which forecasts are good enough, and whether more nodes can improve a bad one.
:mod:`malletrain.core.goal_keeper` decides when to evaluate and what follows.
"""

from __future__ import annotations

import math

from malletrain.core.goal_record import GoalRecord
from malletrain.core.goals import GoalStanding

RECOVERY_SLACK = 0.05
"""A job at risk is on track again when 90 % of its forecast ends leave at least this fraction of
the remaining time.
"""
AT_RISK_FACTOR = 1.15
"""A budget is at risk if it would not suffice for a job that is slower than expected by this
factor.
"""

SENTENCES = {
    GoalStanding.ON_TRACK: "Nine of ten forecasts hold the job's deadline and budget.",
    GoalStanding.AT_RISK: "More than one of ten forecasts breaks the job's deadline or budget.",
    GoalStanding.INFEASIBLE: "The deadline or the budget can no longer be met with as many nodes "
    "as in the last days.",
    GoalStanding.MET: "The job is done in time and within its budget.",
    GoalStanding.MISSED: "The job was not done by its deadline, or ended before it was done.",
}
"""Standing → sentence for users."""


def judged(record: GoalRecord, charge_factor: float, now: float) -> GoalStanding | None:
    """Return the standing of a job; None without goals or without enough data."""
    deadline, forecast = record.goals.deadline, record.forecast
    if deadline is not None and now > deadline:
        return GoalStanding.MISSED
    standings = [_by_budget(record, charge_factor, now)]
    if deadline is not None and forecast is not None:
        slack = RECOVERY_SLACK if record.standing is GoalStanding.AT_RISK else 0.0
        late = forecast.high > deadline - slack * (deadline - now)
        if record.need is None:
            standings.append(GoalStanding.INFEASIBLE)
        else:
            standings.append(GoalStanding.AT_RISK if late else GoalStanding.ON_TRACK)
    order = (GoalStanding.INFEASIBLE, GoalStanding.AT_RISK, GoalStanding.ON_TRACK)
    return next((each for each in order if each in standings), None)


def _by_budget(record: GoalRecord, charge_factor: float, now: float) -> GoalStanding | None:
    if record.goals.budget_s is None:
        return None
    if record.job.halted:
        return GoalStanding.INFEASIBLE
    required_yield, pace = least_yield(record, charge_factor, now), record.pace
    if required_yield is None or pace is None:
        return None
    best = record.curve.best_rate_per_node * pace
    if best < required_yield:
        return GoalStanding.INFEASIBLE
    return GoalStanding.AT_RISK if best < AT_RISK_FACTOR * required_yield else GoalStanding.ON_TRACK


def more_nodes_help(record: GoalRecord, now: float) -> bool:
    """Return whether more nodes can still save a deadline that is in danger. False if the job has
    as many nodes as it can use, if its largest size is too slow, or if its budget is spent.
    """
    deadline, sizes = record.goals.deadline, record.sizes()
    in_danger = record.standing in (GoalStanding.AT_RISK, GoalStanding.INFEASIBLE)
    if deadline is None or now >= deadline or not in_danger or record.job.halted or not sizes:
        return False
    if len(record.job.nodes) >= sizes[-1]:
        return False
    remaining_work, rates = record.remaining_work, record.rates()
    return (
        remaining_work is None
        or rates is None
        or remaining_work <= float(max(rates)) * (deadline - now)
    )


def least_yield(record: GoalRecord, charge_factor: float, now: float) -> float | None:
    """Return the minimum samples per node-second with which the budget suffices; None if not
    known.
    """
    remaining_work, budget_s = record.remaining_work, record.goals.budget_s
    if remaining_work is None or budget_s is None or charge_factor <= 0:
        return None
    seconds = (budget_s - record.account.charged(now)) / charge_factor
    return remaining_work / seconds if seconds > 0 else math.inf
