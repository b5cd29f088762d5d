"""Moments as people say them: ``18:00``, ``friday 18:00``, ``tomorrow 08:00``, ``friday``.

Decides which moment is meant: the next such one, in the local time of who says it; a day alone is
its beginning, as that of a date is. What could be taken for two moments, or is none on that day, is
refused with a sentence. Pure but for the time zone. Raises
:class:`malletrain.submission.error.SpecError`.
"""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta

from malletrain.submission.error import SpecError

DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
RELATIVE = {"today": 0, "tomorrow": 1}
SAID_HELP = '"18:00", "tomorrow 08:00", "friday 18:00" or "friday"'

_DAY = rf"(?P<day>{'|'.join((*RELATIVE, *(f'{name[:3]}(?:{name[3:]})?' for name in DAYS)))})"
_CLOCK = r"(?:at +)?(?P<hour>\d{1,2})(?::(?P<minute>\d\d)(?::(?P<second>\d\d))?)? *(?P<half>[ap]m)?"
_FORMS = tuple(
    re.compile(form)
    for form in (_DAY, _CLOCK, f"{_DAY},? +{_CLOCK}", f"{_CLOCK},? +(?:on +)?{_DAY}")
)


def said_time(text: str, now: float) -> float | None:
    """Seconds since the epoch of the moment that is meant, after ``now``; None where the text is
    not of this form.
    """
    words = text.strip().lower()
    match = next((found for form in _FORMS if (found := form.fullmatch(words))), None)
    if match is None:
        return None
    groups = match.groupdict()
    day = groups.get("day") or ""
    if not groups.get("hour"):
        return _beginning(text, day, now)
    clock = _clock(text, groups)
    if clock is None:
        return None
    today = datetime.fromtimestamp(now).date()
    for on in _days(day, today):
        moment = _on(on, clock, now, text)
        if moment is not None:
            return moment
    raise SpecError(
        f'The deadline "{text}" is over already: it is {datetime.fromtimestamp(now):%H:%M}. Say '
        f'"tomorrow {clock:%H:%M}" for that of tomorrow.'
    )


def _beginning(text: str, day: str, now: float) -> float:
    """Of a day that is said without a time."""
    today = datetime.fromtimestamp(now).date()
    on = _days(day, today)[0]
    if on == today:
        when = "" if day in RELATIVE else f" on a {DAYS[today.weekday()].capitalize()}"
        also = "" if day in RELATIVE else f", or {today + timedelta(days=7)} for that of next week"
        raise SpecError(
            f'"{text}" is no deadline{when}: a day without a time is its beginning, and that is '
            f'over. Give a time, such as "today 18:00"{also}.'
        )
    return datetime.combine(on, time()).timestamp()


def _clock(text: str, groups: dict[str, str]) -> time | None:
    """The time of the day; None: a number that is none by itself. Raises SpecError."""
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


def _days(day: str, today: date) -> list[date]:
    """The days that can be meant, the nearest first."""
    if not day:
        return [today, today + timedelta(days=1)]
    if day in RELATIVE:
        return [today + timedelta(days=RELATIVE[day])]
    wanted = next(k for k, name in enumerate(DAYS) if name.startswith(day))
    ahead = (wanted - today.weekday()) % 7
    return [today + timedelta(days=ahead), today + timedelta(days=ahead + 7)]


def _on(day: date, clock: time, now: float, text: str) -> float | None:
    """When it is that time on that day; where clocks are set back, the first that is to come. None:
    it is over. Raises SpecError where clocks leave that time out.
    """
    said = datetime.combine(day, clock)
    times = [said.replace(fold=fold).timestamp() for fold in (0, 1)]
    if max(times) <= now:
        return None
    if all(datetime.fromtimestamp(at) != said for at in times):
        raise SpecError(
            f'"{text}" is no deadline: clocks are set forward on {day}, and it is never '
            f"{clock:%H:%M} then. Give a time before or after that."
        )
    return min(at for at in times if at > now)
