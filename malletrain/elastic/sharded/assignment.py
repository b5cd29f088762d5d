"""Which process becomes which rank of the next group, so that the fewest bytes move.

Decides the order by an assignment problem over what each process holds and each new rank is to
hold; exactly, by the Hungarian method (Kuhn 1955, in the O(n³) form with potentials). It is written
out here because a script's environment has torch and need not have scipy, and imports of the
training side are the standard library's and torch's.

Rank 0 of the daemon's order stays rank 0: its node is asked for snapshots. Since contiguous parts
begin together at the front, that costs nothing unless the process that held part 0 leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from malletrain.elastic.sharded.chunks import share

Rows = Mapping[int, int]
"""Bytes of one row, summed over all tensors that have so many rows in the dimension that is cut, by
that number of rows."""


@dataclass(frozen=True)
class StatePart:
    """The part that a process holds: ``part`` of ``parts``, each a contiguous run of rows."""

    part: int
    """From 0."""
    parts: int
    """Into how many the state is cut."""
    rows: tuple[tuple[int, int], ...]
    """(rows, bytes of a row) of the state: :data:`Rows`."""


def overlap(source: StatePart, part: int, parts: int) -> int:
    """Bytes that ``source`` has of ``part`` of ``parts``."""
    total = 0
    for length, row_bytes in source.rows:
        first, number = share(length, source.parts, source.part)
        begin, count = share(length, parts, part)
        total += row_bytes * max(0, min(first + number, begin + count) - max(first, begin))
    return total


def best_order(holdings: Sequence[StatePart | None]) -> list[int]:
    """The new rank of each process of the next group.

    Args:
        holdings: what each of them holds, in the daemon's order; None for a joiner.

    Returns:
        A permutation, beginning with 0, with which the fewest bytes move.
    """
    size = len(holdings)
    order = [-1] * size
    order[0] = 0
    rows = [process for process in range(1, size) if holdings[process] is not None]
    gains = [
        [overlap(one, part, size) for part in range(1, size)]
        for process in rows
        if (one := holdings[process]) is not None
    ]
    for process, part in zip(rows, _most(gains), strict=True):
        order[process] = part + 1
    free = iter(sorted(set(range(size)) - set(order)))
    return [next(free) if rank < 0 else rank for rank in order]


def _most(gains: Sequence[Sequence[int]]) -> list[int]:
    """The column of each row, no column twice, with the largest sum. Not more rows than columns."""
    if not gains:
        return []
    width = len(gains[0])
    of_row = [0] * (len(gains) + 1)
    of_column = [0] * (width + 1)
    row_at = [0] * (width + 1)
    """The row that has a column, from 1; 0 for none. Column 0 is where a new row enters."""
    for row in range(1, len(gains) + 1):
        row_at[0] = row
        column = 0
        slack = [float("inf")] * (width + 1)
        came_from = [0] * (width + 1)
        used = [False] * (width + 1)
        while row_at[column]:
            used[column] = True
            here, smallest, nearest = row_at[column], float("inf"), 0
            for other in range(1, width + 1):
                if used[other]:
                    continue
                cost = -gains[here - 1][other - 1] - of_row[here] - of_column[other]
                if cost < slack[other]:
                    slack[other], came_from[other] = cost, column
                if slack[other] < smallest:
                    smallest, nearest = slack[other], other
            for other in range(width + 1):
                if used[other]:
                    of_row[row_at[other]] += int(smallest)
                    of_column[other] -= int(smallest)
                else:
                    slack[other] -= smallest
            column = nearest
        while column:
            row_at[column] = row_at[came_from[column]]
            column = came_from[column]
    columns = [0] * len(gains)
    for column in range(1, width + 1):
        if row_at[column]:
            columns[row_at[column] - 1] = column - 1
    return columns
