"""The LP relaxation over several classes, by column generation in HiGHS.

Decides the prices where coordinate descent gets stuck: with several classes the bound is not
smooth, and a price cannot always be improved alone. The LP is solved over a few rows; its duals are
new prices; rows that are cheap at these prices join, until the LP over the few is worth as much as
the bound, so that no other row could change it. One basic solution is kept: all but a few jobs have
a whole size in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from allocator.highs import LinearProgram, SolverError, maximise
from allocator.prices import Dual, at
from allocator.table import IDLE, BidTable, Floats, Ints

log = logging.getLogger(__name__)

_ROUNDS = 40
_CLOSE = 1e-9


def relax(
    table: BidTable, dual: Dual, seats: Ints, *, left_s: Callable[[], float]
) -> tuple[Dual, Ints | None]:
    """Better prices, and the LP's solution in whole jobs, which may exceed the capacity a little
    (None when there was no time).

    Args:
        seats: a feasible plan; its rows keep the LP feasible.
        left_s: seconds left.
    """
    best, plan = dual, None
    budget = min(len(table.size), 4 * len(table.starts) + 64)
    pool = seats > 0
    pool[np.argpartition(dual.loss, budget - 1)[:budget]] = True
    pool[dual.loss <= dual.noise] = True
    for _ in range(_ROUNDS):
        left = left_s()
        if left <= 0:
            break
        rows = np.flatnonzero(pool)
        solved = _lp(table, dual, rows, left)
        if solved is None:
            break
        worth, share, prices = solved
        plan = _whole(table, rows, share)
        # Duals of a small LP swing widely, so prices halfway to the best ones are asked as well.
        for current in (at(table, prices), at(table, 0.5 * (prices + best.prices))):
            pool[current.loss <= current.noise] = True
            if current.bound < best.bound:
                best = current
        if best.bound - worth <= _CLOSE * abs(worth):
            break
    return best, plan


def _whole(table: BidTable, rows: Ints, share: Floats) -> Ints:
    """Members by row from their shares: rounded down, the rest of each group where its largest
    remainder is.
    """
    plan = np.zeros(len(table.size), np.int64)
    whole = np.floor(share + 1e-6).astype(np.int64)
    plan[rows] = whole
    order = np.argsort(share - whole, kind="stable")
    largest = np.empty(len(table.starts), np.int64)
    largest[table.group[rows[order]]] = rows[order]
    plan[largest] += table.count.astype(np.int64) - np.add.reduceat(plan, table.starts)
    return plan


def _lp(
    table: BidTable, dual: Dual, rows: Ints, time_limit_s: float
) -> tuple[float, Floats, Floats] | None:
    """(value, members by row, prices) of the LP over ``rows``. Solved in losses at the prices of
    ``dual``, scaled to about 1.
    """
    groups, resources, n = len(table.starts), len(table.capacity), len(rows)
    resource = table.resource[rows]
    counted = resource != IDLE
    begins = np.concatenate([[0], np.cumsum(1 + counted.astype(np.int64))])
    index, coefficient = np.zeros(int(begins[-1]), np.int64), np.ones(int(begins[-1]))
    index[begins[:-1]] = table.group[rows]
    index[begins[:-1][counted] + 1] = groups + resource[counted]
    coefficient[begins[:-1][counted] + 1] = table.size[rows][counted]
    reduced = -dual.loss[rows]
    scale = float(np.mean(-reduced)) or 1.0
    unused = np.arange(resources)
    model = LinearProgram(
        cost=np.concatenate([reduced, -dual.prices]) / scale,
        lower=np.zeros(n + resources),
        upper=np.full(n + resources, np.inf),
        integral=np.zeros(n + resources, np.bool_),
        starts=np.concatenate([begins, begins[-1] + 1 + unused]),
        rows=np.concatenate([index, groups + unused]),
        coefficients=np.concatenate([coefficient, np.ones(resources)]),
        row_lower=np.concatenate([table.count, table.capacity]),
        row_upper=np.concatenate([table.count, table.capacity]),
    )
    try:
        answer = maximise(model, time_limit_s=time_limit_s)
    except SolverError as error:  # costs a good bound, not the plan
        log.warning("The allocation goes on with a weaker bound. %s", error)
        return None
    if answer.x is None or answer.duals is None:
        return None
    prices = np.maximum(0.0, dual.prices + answer.duals[groups:] * scale)
    return dual.bound + answer.objective * scale, answer.x[:n], prices
