"""Deadlines, budgets and work as their owners write them: ``in 6 h``, ``2026-12-01T08:00``,
``friday 18:00``, ``200nh``, ``1.3e8``.

Decides what such a text means. The daemon decides whether a deadline can be met.
"""

from __future__ import annotations

import math
import re
import time
from datetime import datetime

from malletrain.config.units import UnitError, parse_duration
from malletrain.submission.deadline_parser import DAY_TIME_HELP, parse_day_time
from malletrain.submission.error import SpecError

DEADLINE_HELP = (
    f"a time such as {DAY_TIME_HELP}, a date such as 2026-12-01T08:00 (local, or with its zone), "
    'or "in 6 h"'
)
BUDGET_HELP = "node-hours, such as 200nh"
WORK_HELP = "a number of samples above 0, such as 1.3e8"
NONE = "none"
"""Value that removes a goal."""

_BUDGET = re.compile(r"\s*(\+?)\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*(?:nh|node-hours?)\s*")


def parse_deadline(text: str, now: float | None = None) -> float:
    """Returns the deadline of ``--deadline``.

    Args:
        text: as the user wrote it.
        now: seconds since the epoch; by default the current time.

    Returns:
        Seconds since the epoch, after ``now``.

    Raises:
        SpecError: the text is not a deadline, or the deadline is past.
    """
    now = time.time() if now is None else now
    words = text.strip()
    if words.lower().startswith("in "):
        try:
            seconds = parse_duration(words[3:])
        except UnitError:
            seconds = 0.0
        if seconds <= 0:
            raise SpecError(
                f'"{text}" is no deadline; accepted is {DEADLINE_HELP}. Units are s, min, h and d.'
            )
        return now + seconds
    if (timestamp := parse_day_time(words, now)) is not None:
        return timestamp
    try:
        timestamp = datetime.fromisoformat(re.sub(r"[zZ]\Z", "+00:00", words)).timestamp()
    except (ValueError, OverflowError, OSError):
        raise SpecError(f'"{text}" is no deadline; accepted is {DEADLINE_HELP}.') from None
    if timestamp <= now:
        raise SpecError(f'The deadline "{text}" is over already; accepted is {DEADLINE_HELP}.')
    return timestamp


def parse_budget(text: str) -> tuple[float, bool]:
    """Returns (node-hours, whether they are added to the current budget) of ``--budget``. Raises
    SpecError.
    """
    match = _BUDGET.fullmatch(text)
    hours = float(match[2]) if match else 0.0
    if match is None or not (math.isfinite(hours) and hours > 0):
        raise SpecError(f'"{text}" is no budget; accepted is {BUDGET_HELP}.')
    return hours, bool(match[1])


def parse_work(text: str) -> float:
    """Returns the number of samples of ``--work``. Raises SpecError."""
    try:
        samples = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        samples = math.nan
    if not (math.isfinite(samples) and samples > 0):
        raise SpecError(f'"{text}" is no amount of work; accepted is {WORK_HELP}.')
    return samples


def changes_of(
    deadline: str | None, budget: str | None, work: str | None
) -> dict[str, float | None]:
    """Returns the changes that ``malletrain extend`` sends for these texts; ``none`` removes a
    goal. Raises SpecError."""
    changes: dict[str, float | None] = {}
    if deadline is not None:
        changes["deadline"] = None if deadline == NONE else parse_deadline(deadline)
    if budget is not None:
        hours, more = (None, False) if budget == NONE else parse_budget(budget)
        changes["more_nh" if more else "budget_nh"] = hours
    if work is not None:
        changes["work"] = None if work == NONE else parse_work(work)
    if not changes:
        raise SpecError("Say what is to change: --deadline, --budget or --work.")
    return changes
