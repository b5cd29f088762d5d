"""Assigns the ranks of the next group to processes so that the fewest bytes move.

Decides the order by an assignment problem: the gain of a pair is the number of bytes that the
process has of the part of the new rank. It is solved exactly, by the Hungarian method (Kuhn 1955,
in the O(n³) form with potentials). The method is implemented here because the environment of a
script has torch, but not always scipy, and the training side imports only the standard library and
torch.

Rank 0 of the daemon's order stays rank 0, because snapshots are requested from its node. The first
part always begins at row 0, so this costs nothing unless the process with part 0 leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from malletrain.elastic.sharded.chunks import share


@dataclass(frozen=True)
class StatePart:
    """The part of the state that a process has, a contiguous range of rows of each tensor."""

    part: int
    """Index of the part, from 0."""
    parts: int
    """Number of parts of the state."""
    rows: tuple[tuple[int, int], ...]
    """(rows in the sharded dimension, bytes per row of all tensors with so many rows together) of
    the state.
    """


def overlap(source: StatePart, part: int, parts: int) -> int:
    """Return the number of bytes that ``source`` has of a part of the next layout.

    Args:
        source: the part that a process has.
        part: index of the other part, from 0.
        parts: number of parts of the next layout.
    """
    total = 0
    for length, row_bytes in source.rows:
        first, number = share(length, source.parts, source.part)
        begin, count = share(length, parts, part)
        total += row_bytes * max(0, min(first + number, begin + count) - max(first, begin))
    return total


def best_order(holdings: Sequence[StatePart | None]) -> list[int]:
    """Return the new rank of each process of the next group.

    Args:
        holdings: the part that each process has, in the daemon's order; None for a joiner.

    Returns:
        A permutation that starts with 0 and minimizes the number of bytes that move.
    """
    size = len(holdings)
    order = [-1] * size
    order[0] = 0
    rows = [process for process in range(1, size) if holdings[process] is not None]
    gains = [
        [overlap(holding, part, size) for part in range(1, size)]
        for process in rows
        if (holding := holdings[process]) is not None
    ]
    for process, part in zip(rows, _maximum_assignment(gains), strict=True):
        order[process] = part + 1
    free = iter(sorted(set(range(size)) - set(order)))
    return [next(free) if rank < 0 else rank for rank in order]


def _maximum_assignment(gains: Sequence[Sequence[int]]) -> list[int]:
    """Return a different column for each row, so that the sum of the gains is the maximum. There
    must not be more rows than columns.
    """
    if not gains:
        return []
    width = len(gains[0])
    row_potential = [0] * (len(gains) + 1)
    column_potential = [0] * (width + 1)
    row_at = [0] * (width + 1)
    """Row of each column, from 1; 0 for none. A new row enters at column 0."""
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
                cost = -gains[here - 1][other - 1] - row_potential[here] - column_potential[other]
                if cost < slack[other]:
                    slack[other], came_from[other] = cost, column
                if slack[other] < smallest:
                    smallest, nearest = slack[other], other
            for other in range(width + 1):
                if used[other]:
                    row_potential[row_at[other]] += int(smallest)
                    column_potential[other] -= int(smallest)
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
