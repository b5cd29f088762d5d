"""Greedy moves of jobs between sizes: feasibility repair, and filling of unused capacity.

Decides the plans from which the exact search (:mod:`allocator.search`) begins. They are the result
only if there is no time for the search.
"""

from __future__ import annotations

import numpy as np

from allocator.prices import Dual
from allocator.table import IDLE, BidTable, Floats, Ints


class _Mover:
    """A mutable plan. For each group it knows the source of the next move: the row in use with the
    largest ``key``.
    """

    def __init__(self, table: BidTable, dual: Dual, plan: Ints, rows: Ints) -> None:
        self.table, self.rows = table, rows
        self.plan: Ints = plan.copy()
        self.free = table.capacity - table.usage(plan)
        self.size, self.value = table.size[rows], table.value[rows]
        self.resource, self.group = table.resource[rows], table.group[rows]
        self.node_cost = np.append(dual.prices, 0.0)[table.resource] * table.size
        self.source = np.empty(len(table.starts), np.int64)
        self.set_source_key(dual.reduced_cost)

    def set_source_key(self, key: Floats) -> None:
        """Move members of the rows with the largest ``key`` (one value per row of the table)
        first.
        """
        self.key = key
        in_use = np.flatnonzero(self.plan)
        if len(in_use) > len(self.source):
            in_use = in_use[np.argsort(key[in_use], kind="stable")]
        self.source[self.table.group[in_use]] = in_use

    def changes(self) -> tuple[Ints, Floats, Ints]:
        """Return the effect of moving one member to each row: (the source row, the value gained,
        the additional units of the row's resource).
        """
        source = self.source[self.group]
        added = self.size - np.where(
            self.table.resource[source] == self.resource, self.table.size[source], 0
        )
        return source, self.value - self.table.value[source], added

    def move(self, index: int, count: int) -> None:
        """Move ``count`` members of the group of row ``rows[index]`` from their source to it."""
        group = int(self.group[index])
        source, target = int(self.source[group]), int(self.rows[index])
        self.plan[source] -= count
        self.plan[target] += count
        for row, sign in ((source, 1), (target, -1)):
            if self.table.resource[row] != IDLE:
                self.free[self.table.resource[row]] += sign * count * float(self.table.size[row])
        first = int(self.table.starts[group])
        in_use = first + np.flatnonzero(self.plan[first : self.table.ends[group]])
        self.source[group] = in_use[np.argmax(self.key[in_use])]


def fill(table: BidTable, dual: Dual, plan: Ints, rows: Ints, moves: int = 100) -> Ints:
    """Improve a feasible plan while there is free capacity.

    Each move is the one with the highest ratio of value gained to the price of the nodes added. It
    moves as many jobs of one group as fit.

    Args:
        table: the options of all groups.
        dual: the prices of nodes.
        plan: members by row, feasible.
        rows: the rows to which jobs may move.
        moves: maximum number of moves.

    Returns:
        Members by row, feasible.
    """
    mover = _Mover(table, dual, plan, rows)
    for _ in range(moves if len(rows) else 0):
        source, gain, added = mover.changes()
        cost = np.maximum(
            mover.node_cost[rows] - mover.node_cost[source], 1e-9 * np.abs(gain) + 1e-300
        )
        fits = added <= np.append(mover.free, np.inf)[mover.resource]
        ratio = np.where(fits & (gain > dual.noise), gain / cost, 0.0)
        best = int(np.argmax(ratio))
        if not ratio[best] > 0:
            break
        count = int(mover.plan[source[best]])
        if added[best] > 0 and mover.resource[best] != IDLE:
            count = min(count, int(mover.free[mover.resource[best]] // added[best]))
        mover.move(best, count)
    return mover.plan


def repair(table: BidTable, dual: Dual, plan: Ints, rows: Ints, moves: int = 2000) -> Ints | None:
    """Bring a plan within the capacity.

    Each move is the one that loses the least value for each node that it frees of the most exceeded
    resource.

    Args:
        table: the options of all groups.
        dual: the prices of nodes.
        plan: members by row; it may exceed the capacity.
        rows: the rows to which jobs may move.
        moves: maximum number of moves.

    Returns:
        Members by row, feasible; None if no move helps. That happens with must-run jobs only.
    """
    mover = _Mover(table, dual, plan, rows)
    keyed_resource = -1
    for _ in range(moves):
        exceeded = int(np.argmin(mover.free)) if len(mover.free) else -1
        if exceeded < 0 or mover.free[exceeded] >= 0:
            return mover.plan
        if exceeded != keyed_resource:
            mover.set_source_key(np.where(table.resource == exceeded, table.nodes, -1.0))
            keyed_resource = exceeded
        excess = -mover.free[exceeded]
        source, gain, added = mover.changes()
        freed = np.where(table.resource[source] == exceeded, table.size[source], 0) - np.where(
            mover.resource == exceeded, mover.size, 0
        )
        fits = (added <= np.append(mover.free, np.inf)[mover.resource]) | (
            mover.resource == exceeded
        )
        useful = np.minimum(freed, excess)
        cost = np.where(fits & (freed > 0), np.maximum(-gain, 0.0) / np.maximum(useful, 1), np.inf)
        best = int(np.argmin(cost)) if len(cost) else -1
        if best < 0 or cost[best] == np.inf:
            return None
        count = min(int(mover.plan[source[best]]), int(np.ceil(excess / freed[best])))
        if mover.resource[best] not in (IDLE, exceeded):
            count = max(1, min(count, int(mover.free[mover.resource[best]] // max(1, added[best]))))
        mover.move(best, count)
    return None
