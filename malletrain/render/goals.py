"""Deadlines, budgets and forecasts in words. Decides the wording; knows nothing of tables."""

from __future__ import annotations

import time

from malletrain.protocol.views import GoalView
from malletrain.render.text import count

DAY_S = 86400.0
WORDS = {
    "on_track": "on track",
    "at_risk": "at risk",
    "infeasible": "infeasible",
    "met": "met",
    "missed": "missed",
}
"""Standing → text for users."""


def moment(at: float, now: float) -> str:
    """Return a time near ``now`` as local text: ``14:00``, ``Thu 14:00``, ``2026-12-01 14:00``."""
    local, today = time.localtime(at), time.localtime(now)
    if local[:3] == today[:3]:
        return time.strftime("%H:%M", local)
    if abs(at - now) < 6 * DAY_S:
        return time.strftime("%a %H:%M", local)
    return time.strftime("%Y-%m-%d %H:%M", local)


def past(hours: float) -> str:
    """Return a description of the history from which a forecast was made."""
    if hours <= 0:
        return "the nodes there are now"
    if hours >= 6.5 * 24:
        return "the nodes of the last week"
    if hours >= 36:
        return f"the nodes of the last {hours / 24:.0f} days"
    return f"the nodes of the last {max(1.0, hours):.0f} h" if hours >= 1 else "the nodes of late"


def forecast(goal: GoalView, now: float) -> str:
    """Return a sentence on when the job ends, or why that is not known; may be empty."""
    if goal.standing == "infeasible" and _spent(goal):
        return (
            "Its budget is spent, so it is suspended; malletrain extend JOB --budget +10nh "
            "continues it."
        )
    if goal.ends is None:
        return goal.why
    low = moment(goal.ends_low, now) if goal.ends_low is not None else "?"
    high = moment(goal.ends_high, now) if goal.ends_high is not None else "much later"
    return f"With {past(goal.history_h)} this ends {moment(goal.ends, now)} ({low} … {high})."


def _spent(goal: GoalView) -> bool:
    """Return whether the budget is spent, to the displayed precision."""
    return goal.budget_nh is not None and goal.charged_nh >= 0.999 * goal.budget_nh


def targets(goal: GoalView, now: float, work: str = "samples") -> str:
    """Return the deadline, the budget and the work: ``by Thu 14:00, 12.5 of 200 nh``. ``work``:
    what the work is counted in.
    """
    parts = []
    if goal.deadline is not None:
        parts.append(f"by {moment(goal.deadline, now)}")
    if goal.budget_nh is not None:
        parts.append(f"{goal.charged_nh:.3g} of {goal.budget_nh:.4g} nh")
    if goal.work is not None:
        parts.append(f"{count(goal.work)} {work}")
    return ", ".join(parts)


def standing(goal: GoalView | None) -> str:
    """Return the standing in at most two words; empty if there is no goal."""
    return "" if goal is None else WORDS.get(goal.standing, goal.standing)


def facts(
    goal: GoalView, now: float, *, ended: bool, work: str = "samples"
) -> list[tuple[str, str]]:
    """Return the labels and values of a job's goals for ``malletrain show``. ``work``: what its
    work is counted in.
    """
    rows = []
    if text := targets(goal, now, work):
        word = standing(goal)
        rows.append(("Wanted", f"{text}: {word}" if word else text))
    if not ended and (prediction := forecast(goal, now)):
        rows.append(("Forecast", prediction))
    return rows


def sentence(goal: GoalView, now: float) -> str:
    """Return a sentence on a job's goals for when it is submitted or extended; may be empty."""
    word = standing(goal)
    text = targets(goal, now) if goal.deadline is not None or goal.budget_nh is not None else ""
    if text:
        text = text[:1].upper() + text[1:] + (f": {word}." if word else ".")
    return " ".join(part for part in (forecast(goal, now), text) if part)
