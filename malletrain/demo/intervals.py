"""Sets of time as sorted, disjoint, half-open intervals ``(start, end)``. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]
Intervals = tuple[Interval, ...]


def normal(pieces: Iterable[Interval]) -> Intervals:
    """Returns the union of ``pieces`` in any order; empty ones are removed, adjacent ones
    merged."""
    union: list[Interval] = []
    for start, end in sorted(p for p in pieces if p[1] > p[0]):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return tuple(union)


def both(a: Intervals, b: Intervals) -> Intervals:
    """Returns the times in ``a`` and in ``b``."""
    common, i, k = [], 0, 0
    while i < len(a) and k < len(b):
        start, end = max(a[i][0], b[k][0]), min(a[i][1], b[k][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[k][1]:
            i += 1
        else:
            k += 1
    return tuple(common)


def without(a: Intervals, b: Intervals) -> Intervals:
    """Returns the times in ``a`` and not in ``b``."""
    rest = []
    for start, end in a:
        for s, e in b:
            if e <= start or s >= end:
                continue
            if s > start:
                rest.append((start, s))
            start = max(start, e)
        if start < end:
            rest.append((start, end))
    return tuple(rest)


def length(a: Intervals) -> float:
    """Returns the total time in ``a``."""
    return sum(end - start for start, end in a)
