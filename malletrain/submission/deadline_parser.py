"""Deadlines as a day and a time of day: ``18:00``, ``friday 18:00``, ``tomorrow 08:00``,
``friday``.

Decides which time such a text means: the next one, in the user's local time zone. A day without a
time means its beginning, like a date. A text that is ambiguous, or names a time that does not exist
on that day, is refused with a sentence. Pure, except that it reads the time zone.
"""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta

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
    """Returns the next time that the text names.

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
    """Returns the beginning of a day that is named without a time. Raises SpecError if it
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
    return datetime.combine(date_, time()).timestamp()


def _clock(text: str, groups: dict[str, str]) -> time | None:
    """Returns the time of day; None for a number that is not a time by itself. Raises SpecError if
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
        return time(hour, int(groups["minute"] or 0), int(groups["second"] or 0))
    except ValueError:
        raise SpecError(
            f'"{text}" is no deadline: there is no such time of the day; times go from 00:00 to '
            "23:59."
        ) from None


def _dates(day: str, today: date) -> list[date]:
    """Returns the dates that a day may mean, the next one first."""
    if not day:
        return [today, today + timedelta(days=1)]
    if day in RELATIVE:
        return [today + timedelta(days=RELATIVE[day])]
    weekday = next(k for k, name in enumerate(DAYS) if name.startswith(day))
    ahead = (weekday - today.weekday()) % 7
    return [today + timedelta(days=ahead), today + timedelta(days=ahead + 7)]


def _timestamp(day: date, clock: time, now: float, text: str) -> float | None:
    """Returns the seconds since the epoch of a time on a day; None if it is past. If a time occurs
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
