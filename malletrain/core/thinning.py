"""Which values of a long series are kept, so that it stays bounded and its plot the same. Pure.

Values are numbered from 0. They fall into buckets of equal width, and the smallest and the largest
value of each bucket are kept: what a plot of as many pixels shows (Jugel et al., M4, VLDB 2014,
without the first and last of each bucket). The first and the newest value are kept too. The width
follows from the number of values and doubles when there would be too many, so the values are all
that has to be stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

MOST_KEPT = 500
"""Values of a series, at most."""


class Numbered(Protocol):
    """One value of a series."""

    @property
    def number(self) -> int:
        """How many came before it."""

    @property
    def value(self) -> float:
        """The value."""


N = TypeVar("N", bound=Numbered)


def width(count: int, most: int = MOST_KEPT) -> int:
    """How many numbers share a bucket when ``count`` values came: a power of two, at most so wide
    that no more than ``most`` values (4 at least) are kept.
    """
    made = 1
    # One bucket of width w keeps min(w, 2) values; the first and the newest come on top.
    while -(-count // made) * min(made, 2) + 2 > max(most, 4) and made < count:
        made *= 2
    return made


def thinned(points: Sequence[N], count: int, most: int = MOST_KEPT) -> list[N]:
    """What is kept of these values, in order: of each bucket the smallest and the largest, number
    0, and the newest. Whether they came at once or piece by piece makes no difference.

    Args:
        points: values in order of their numbers; some may be missing, as they were thinned before.
        count: how many values came in all, which says how wide a bucket is.
        most: how many are kept at most.
    """
    wide = width(count, most)
    buckets: dict[int, list[N]] = {}
    for point in points:
        buckets.setdefault(point.number // wide, []).append(point)
    selected: dict[int, N] = {p.number: p for p in points[-1:]}
    if points and not points[0].number:
        selected[0] = points[0]
    for bucket in buckets.values():
        for point in (min(bucket, key=_value), max(bucket, key=_value)):
            selected[point.number] = point
    return [selected[number] for number in sorted(selected)]


def _value(point: Numbered) -> float:
    """Its place among others; what is no number is above all, so that a picture shows it."""
    return math.inf if math.isnan(point.value) else point.value
