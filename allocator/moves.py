"""Greedy moves of single jobs: make a plan feasible, and fill what it leaves unused.

Decides nothing for good: these plans are where the exact search begins, and the answer when there
is no time for it.
"""

from __future__ import annotations

import numpy as np

from allocator.prices import Dual
from allocator.table import IDLE, BidTable, Floats, Ints


class _Mover:
    """A plan being changed, and of each group the row in use whose members are moved next: that
    with the largest ``key``.
    """

    def __init__(self, table: BidTable, dual: Dual, plan: Ints, rows: Ints) -> None:
        self.table, self.rows = table, rows
        self.plan: Ints = plan.copy()
        self.free = table.capacity - table.use(plan)
        self.size, self.resource, self.group, self.value = (
            table.size[rows],
            table.resource[rows],
            table.group[rows],
            table.value[rows],
        )
        self.charge = np.append(dual.prices, 0.0)[table.resource] * table.size
        self.source = np.empty(len(table.starts), np.int64)
        self.choose_by(dual.loss)

    def choose_by(self, key: Floats) -> None:
        """Take members away first where ``key`` (by row of the table) is largest."""
        self.key = key
        taken = np.flatnonzero(self.plan)
        if len(taken) > len(self.source):
            taken = taken[np.argsort(key[taken], kind="stable")]
        self.source[self.table.group[taken]] = taken

    def changes(self) -> tuple[Ints, Floats, Ints]:
        """Per row: where a member would come from, the value gained, and the units more of the
        row's own resource.
        """
        origin = self.source[self.group]
        more = self.size - np.where(
            self.table.resource[origin] == self.resource, self.table.size[origin], 0
        )
        return origin, self.value - self.table.value[origin], more

    def move(self, at: int, number: int) -> None:
        """Move ``number`` members of the source of row ``rows[at]`` there."""
        start, end, g = int(self.source[self.group[at]]), int(self.rows[at]), int(self.group[at])
        self.plan[start] -= number
        self.plan[end] += number
        for row, sign in ((start, 1), (end, -1)):
            if self.table.resource[row] != IDLE:
                self.free[self.table.resource[row]] += sign * number * float(self.table.size[row])
        first = int(self.table.starts[g])
        mine = first + np.flatnonzero(self.plan[first : self.table.ends[g]])
        self.source[g] = mine[np.argmax(self.key[mine])]


def fill(table: BidTable, dual: Dual, plan: Ints, rows: Ints, moves: int = 100) -> Ints:
    """``plan`` improved while there is room, by moves to one of ``rows`` that gain most for the
    price of the nodes they take.

    A move takes as many alike jobs along as fit.
    """
    mover = _Mover(table, dual, plan, rows)
    for _ in range(moves if len(rows) else 0):
        origin, gain, more = mover.changes()
        cost = np.maximum(mover.charge[rows] - mover.charge[origin], 1e-9 * np.abs(gain) + 1e-300)
        fits = more <= np.append(mover.free, np.inf)[mover.resource]
        yields = np.where(fits & (gain > dual.noise), gain / cost, 0.0)
        best = int(np.argmax(yields))
        if not yields[best] > 0:
            break
        number = int(mover.plan[origin[best]])
        if more[best] > 0 and mover.resource[best] != IDLE:
            number = min(number, int(mover.free[mover.resource[best]] // more[best]))
        mover.move(best, number)
    return mover.plan


def repair(table: BidTable, dual: Dual, plan: Ints, rows: Ints, moves: int = 2000) -> Ints | None:
    """``plan`` within the capacity, by moves to one of ``rows`` that give up least for the nodes
    they free.

    None when no move is left that would help; that takes must-run jobs.
    """
    mover = _Mover(table, dual, plan, rows)
    crowded = -1
    for _ in range(moves):
        short = int(np.argmin(mover.free)) if len(mover.free) else -1
        if short < 0 or mover.free[short] >= 0:
            return mover.plan
        if short != crowded:
            mover.choose_by(np.where(table.resource == short, table.nodes, -1.0))
            crowded = short
        origin, gain, more = mover.changes()
        freed = np.where(table.resource[origin] == short, table.size[origin], 0) - np.where(
            mover.resource == short, mover.size, 0
        )
        fits = (more <= np.append(mover.free, np.inf)[mover.resource]) | (mover.resource == short)
        useful = np.minimum(freed, -mover.free[short])
        price = np.where(fits & (freed > 0), np.maximum(-gain, 0.0) / np.maximum(useful, 1), np.inf)
        best = int(np.argmin(price)) if len(price) else -1
        if best < 0 or price[best] == np.inf:
            return None
        number = min(int(mover.plan[origin[best]]), int(np.ceil(-mover.free[short] / freed[best])))
        if mover.resource[best] not in (IDLE, short):
            number = max(
                1, min(number, int(mover.free[mover.resource[best]] // max(1, more[best])))
            )
        mover.move(best, number)
    return None
