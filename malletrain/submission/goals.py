"""Deadlines, budgets and work as their owners write them: ``in 6 h``, ``2026-12-01T08:00``,
``friday 18:00``, ``200nh``, ``1.3e8``.

Decides what such a text means. The daemon decides whether a deadline can be met.

:func:`parse_day_time` reads a day and a time of day: ``18:00``, ``friday 18:00``, ``tomorrow
08:00``, ``friday``. Such a text means the next such time in the user's local time zone. A day
without a time means its beginning, like a date. A text that is ambiguous, or names a time that does
not exist on that day, is refused with a sentence. (dateparser takes "friday" for the last one and
"5" for a day; dateutil takes "5" for a day, and does not know "in 6 h".)
"""

from __future__ import annotations

import datetime as dt
import math
import re
import time
from datetime import date, datetime, timedelta

from malletrain.config.units import UnitError, parse_duration
from malletrain.submission.error import SpecError

DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
RELATIVE = {"today": 0, "tomorrow": 1}
DAY_TIME_HELP = '"18:00", "tomorrow 08:00", "friday 18:00" or "friday"'

_DAY = rf"(?P<day>{'|'.join((*RELATIVE, *(f'{name[:3]}(?:{name[3:]})?' for name in DAYS)))})"
_CLOCK = r"(?:at +)?(?P<hour>\d{1,2})(?::(?P<minute>\d\d)(?::(?P<second>\d\d))?)? *(?P<half>[ap]m)?"
_FORMS = tuple(
    re.compile(form)
    for form in (_DAY, _CLOCK, f"{_DAY},? +{_CLOCK}", f"{_CLOCK},? +(?:on +)?{_DAY}")
)


def parse_day_time(text: str, now: float) -> float | None:
    """Return the next time that the text names.

    Args:
        text: as the user wrote it.
        now: seconds since the epoch.

    Returns:
        Seconds since the epoch, after ``now``; None if the text is not of this form.

    Raises:
        SpecError: the text is ambiguous, or names a time that is in the past or does not exist.
    """
    words = text.strip().lower()
    match = next((match for form in _FORMS if (match := form.fullmatch(words))), None)
    if match is None:
        return None
    groups = match.groupdict()
    day = groups.get("day") or ""
    if not groups.get("hour"):
        return _start_of_day(text, day, now)
    clock = _clock(text, groups)
    if clock is None:
        return None
    today = datetime.fromtimestamp(now).date()
    for date_ in _dates(day, today):
        timestamp = _timestamp(date_, clock, now, text)
        if timestamp is not None:
            return timestamp
    raise SpecError(
        f'The deadline "{text}" is over already: it is {datetime.fromtimestamp(now):%H:%M}. Say '
        f'"tomorrow {clock:%H:%M}" for that of tomorrow.'
    )


def _start_of_day(text: str, day: str, now: float) -> float:
    """Return the beginning of a day that is named without a time. Raises SpecError if it
    is past."""
    today = datetime.fromtimestamp(now).date()
    date_ = _dates(day, today)[0]
    if date_ == today:
        when = "" if day in RELATIVE else f" on a {DAYS[today.weekday()].capitalize()}"
        also = "" if day in RELATIVE else f", or {today + timedelta(days=7)} for that of next week"
        raise SpecError(
            f'"{text}" is no deadline{when}: a day without a time is its beginning, and that is '
            f'over. Give a time, such as "today 18:00"{also}.'
        )
    return datetime.combine(date_, dt.time()).timestamp()


def _clock(text: str, groups: dict[str, str]) -> dt.time | None:
    """Return the time of day; None for a number that is not a time by itself. Raises SpecError if
    there is no such time.
    """
    hour, half = int(groups["hour"]), groups["half"]
    if not (half or groups["minute"]):
        return None
    if half and not 1 <= hour <= 12:
        hour = 24
    elif half:
        hour = hour % 12 + (12 if half == "pm" else 0)
    try:
        return dt.time(hour, int(groups["minute"] or 0), int(groups["second"] or 0))
    except ValueError:
        raise SpecError(
            f'"{text}" is no deadline: there is no such time of the day; times go from 00:00 to '
            "23:59."
        ) from None


def _dates(day: str, today: date) -> list[date]:
    """Return the dates that a day may mean, the next one first."""
    if not day:
        return [today, today + timedelta(days=1)]
    if day in RELATIVE:
        return [today + timedelta(days=RELATIVE[day])]
    weekday = next(k for k, name in enumerate(DAYS) if name.startswith(day))
    ahead = (weekday - today.weekday()) % 7
    return [today + timedelta(days=ahead), today + timedelta(days=ahead + 7)]


def _timestamp(day: date, clock: dt.time, now: float, text: str) -> float | None:
    """Return the seconds since the epoch of a time on a day; None if it is past. If a time occurs
    twice because clocks are set back, it means the next of the two. Raises SpecError if it is
    skipped because clocks are set forward.
    """
    local = datetime.combine(day, clock)
    times = [local.replace(fold=fold).timestamp() for fold in (0, 1)]
    if max(times) <= now:
        return None
    if all(datetime.fromtimestamp(at) != local for at in times):
        raise SpecError(
            f'"{text}" is no deadline: clocks are set forward on {day}, and it is never '
            f"{clock:%H:%M} then. Give a time before or after that."
        )
    return min(at for at in times if at > now)


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
    """Return the deadline of ``--deadline``.

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
    """Return (node-hours, whether they are added to the current budget) of ``--budget``. Raises
    SpecError.
    """
    match = _BUDGET.fullmatch(text)
    hours = float(match[2]) if match else 0.0
    if match is None or not (math.isfinite(hours) and hours > 0):
        raise SpecError(f'"{text}" is no budget; accepted is {BUDGET_HELP}.')
    return hours, bool(match[1])


def parse_work(text: str) -> float:
    """Return the number of samples of ``--work``. Raises SpecError."""
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
    """Return the changes that ``malletrain extend`` sends for these texts; ``none`` removes a
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
