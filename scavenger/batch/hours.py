"""Hours of the week in which leases may be taken: ``"mon-fri 19:00-07:00"``, ``"sat"``,
``"22:00-06:00"``.

In local time of this machine. Decides only whether a time is inside the hours and when they end.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY = "|".join(DAYS)
_FORM = re.compile(rf"(?:({_DAY})(?:-({_DAY}))?)?\s*(?:(\d{{1,2}}):(\d\d)-(\d{{1,2}}):(\d\d))?")
HOURS_HELP = (
    '"mon-fri 19:00-07:00", "sat" or "22:00-06:00" (days, hours or both; a span over '
    "midnight belongs to the day it begins on)"
)
_WEEK_MIN = 7 * 24 * 60


class HoursError(ValueError):
    """The text does not describe hours of the week."""


@dataclass(frozen=True)
class Hours:
    """Minutes of the week (from Monday 00:00) in which leases may be taken, as sorted, disjoint
    spans; empty: always.
    """

    spans: tuple[tuple[int, int], ...] = ()
    """(start, end) of each span, minutes of the week."""

    def remaining_s(self, now: float) -> float | None:
        """Return the remaining seconds of the present hours; 0 outside of them, None if they have
        no end. ``now``: epoch seconds.
        """
        if not self.spans:
            return None
        local_time = time.localtime(now)
        minute = (
            (local_time.tm_wday * 24 + local_time.tm_hour) * 60
            + local_time.tm_min
            + local_time.tm_sec / 60.0
        )
        for begin, end in self.spans:
            if begin <= minute < end:
                if end == _WEEK_MIN and self.spans[0][0] == 0:  # the span continues on Monday
                    end += self.spans[0][1]
                if end - begin >= _WEEK_MIN:
                    return None
                # The night of a change to or from daylight saving time has another length.
                end_today = end - local_time.tm_wday * 1440
                date = (local_time.tm_year, local_time.tm_mon, local_time.tm_mday)
                return max(0.0, time.mktime((*date, 0, end_today, 0, 0, 0, -1)) - now)
        return 0.0


def parse_hours(texts: Sequence[str]) -> Hours:
    """Return the union of the spans in ``texts``. Raises HoursError with a description of the valid
    form.
    """
    minutes = bytearray(_WEEK_MIN)
    for text in texts:
        for begin, end in _spans(text):
            for minute in range(begin, end):
                minutes[minute % _WEEK_MIN] = 1
    spans: list[tuple[int, int]] = []
    for minute, inside in enumerate(minutes):
        if inside and spans and spans[-1][1] == minute:
            spans[-1] = (spans[-1][0], minute + 1)
        elif inside:
            spans.append((minute, minute + 1))
    return Hours(tuple(spans))


def _spans(text: str) -> list[tuple[int, int]]:
    match = _FORM.fullmatch(text.strip().lower())
    if match is None or not match[0]:
        raise HoursError(f'"{text}" names no hours; accepted is {HOURS_HELP}.')
    first, last, *clock = match.groups()
    days = range(7)
    if first is not None:
        a, b = DAYS.index(first), DAYS.index(last or first)
        days = range(a, b + 1 if b >= a else b + 8)
    if clock[0] is None:
        return [(day * 1440, (day + 1) * 1440) for day in days]
    h1, m1, h2, m2 = map(int, clock)
    begin, end = h1 * 60 + m1, h2 * 60 + m2
    if m1 > 59 or m2 > 59 or begin >= 1440 or end > 1440:
        raise HoursError(f'"{text}" names no hours; accepted is {HOURS_HELP}.')
    if end <= begin:
        end += 1440
    return [(day * 1440 + begin, day * 1440 + end) for day in days]
