"""Downsamples a long series so that its size is bounded and its plot looks the same. Pure.

Values are numbered from 0. They fall into buckets of equal width, and the smallest and the largest
value of each bucket are kept: what a plot of as many pixels shows (Jugel et al., M4, VLDB 2014,
without the first and last of each bucket). The first and the newest value are kept too. The bucket
width depends only on the number of values: it doubles when too many would be kept. So only the
values have to be stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

MAX_POINTS = 500
"""Maximum number of values of a series."""


class Numbered(Protocol):
    """One value of a series."""

    @property
    def number(self) -> int:
        """Index of the value in the series, from 0."""

    @property
    def value(self) -> float:
        """The value."""


PointT = TypeVar("PointT", bound=Numbered)


def width(count: int, max_points: int = MAX_POINTS) -> int:
    """Return the bucket width for a series of ``count`` values: the smallest power of two with
    which at most ``max_points`` values are kept. A ``max_points`` below 4 counts as 4.
    """
    bucket_width = 1
    # One bucket of width w keeps min(w, 2) values; the first and the newest value are kept in
    # addition.
    while (
        -(-count // bucket_width) * min(bucket_width, 2) + 2 > max(max_points, 4)
        and bucket_width < count
    ):
        bucket_width *= 2
    return bucket_width


def thinned(points: Sequence[PointT], count: int, max_points: int = MAX_POINTS) -> list[PointT]:
    """Return the values to keep, in order: the smallest and the largest of each bucket, the first
    and the newest. One call and many calls on growing series give the same result.

    Args:
        points: values in order of index. Values that an earlier call removed are missing.
        count: total number of values of the series. It determines the bucket width.
        max_points: maximum number of values to keep.
    """
    bucket_width = width(count, max_points)
    buckets: dict[int, list[PointT]] = {}
    for point in points:
        buckets.setdefault(point.number // bucket_width, []).append(point)
    selected: dict[int, PointT] = {p.number: p for p in points[-1:]}
    if points and not points[0].number:
        selected[0] = points[0]
    for bucket in buckets.values():
        for point in (min(bucket, key=_sort_key), max(bucket, key=_sort_key)):
            selected[point.number] = point
    return [selected[number] for number in sorted(selected)]


def _sort_key(point: Numbered) -> float:
    """Sort key of a point. NaN sorts above all numbers, so that a plot shows it."""
    return math.inf if math.isnan(point.value) else point.value
