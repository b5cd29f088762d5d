"""The LP relaxation over several classes of nodes, by column generation in HiGHS.

Decides the prices where coordinate descent (:mod:`allocator.prices`) gets stuck: with several
classes the dual function is not smooth, and a single price cannot always be improved alone. The
master LP has a pool of rows. Its duals are new prices; rows with reduced cost 0 at these prices
join the pool, until the value of the LP equals the bound, so that no further row can change it. The
last basic solution becomes a plan: all but a few jobs have a whole size in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from allocator.highs import LinearProgram, SolverError, maximise
from allocator.prices import Dual, dual_at
from allocator.table import IDLE, BidTable, Floats, Ints

log = logging.getLogger(__name__)

_MAX_ITERATIONS = 40
_RELATIVE_GAP = 1e-9
"""Gap between the LP and the bound at which column generation ends."""


def relax(
    table: BidTable, dual: Dual, feasible: Ints, *, remaining_s: Callable[[], float]
) -> tuple[Dual, Ints | None]:
    """Improve the prices, and round the solution of the LP to a plan.

    Args:
        table: the options of all groups.
        dual: the first prices.
        feasible: a feasible plan, members by row; its rows keep the LP feasible.
        remaining_s: returns the remaining time, seconds.

    Returns:
        (the prices with the least bound, the rounded LP solution). The plan may exceed the capacity
        a little; it is None if there was no time for an LP.
    """
    best, plan = dual, None
    pool_size = min(len(table.size), 4 * len(table.starts) + 64)
    pool = feasible > 0
    pool[np.argpartition(dual.reduced_cost, pool_size - 1)[:pool_size]] = True
    pool[dual.reduced_cost <= dual.noise] = True
    for _ in range(_MAX_ITERATIONS):
        time_limit_s = remaining_s()
        if time_limit_s <= 0:
            break
        rows = np.flatnonzero(pool)
        solution = _lp(table, dual, rows, time_limit_s)
        if solution is None:
            break
        lp_value, members, prices = solution
        plan = _rounded(table, rows, members)
        # Stabilisation: the duals of a small LP oscillate, so the midpoint to the best prices is
        # evaluated as well.
        for current in (dual_at(table, prices), dual_at(table, 0.5 * (prices + best.prices))):
            pool[current.reduced_cost <= current.noise] = True
            if current.bound < best.bound:
                best = current
        if best.bound - lp_value <= _RELATIVE_GAP * abs(lp_value):
            break
    return best, plan


def _rounded(table: BidTable, rows: Ints, members: Floats) -> Ints:
    """Return whole members by row: ``members`` rounded down, and the rest of each group on its row
    with the largest remainder.
    """
    plan = np.zeros(len(table.size), np.int64)
    whole = np.floor(members + 1e-6).astype(np.int64)
    plan[rows] = whole
    order = np.argsort(members - whole, kind="stable")
    largest = np.empty(len(table.starts), np.int64)
    largest[table.group[rows[order]]] = rows[order]
    plan[largest] += table.count.astype(np.int64) - np.add.reduceat(plan, table.starts)
    return plan


def _lp(
    table: BidTable, dual: Dual, rows: Ints, time_limit_s: float
) -> tuple[float, Floats, Floats] | None:
    """Return (value, members by row, prices) of the LP over ``rows``; None if HiGHS fails or is
    stopped.

    The objective is in reduced costs at the prices of ``dual``, scaled to about 1.
    """
    groups, resources, n = len(table.starts), len(table.capacity), len(rows)
    resource = table.resource[rows]
    uses_nodes = resource != IDLE
    begins = np.concatenate([[0], np.cumsum(1 + uses_nodes.astype(np.int64))])
    index, coefficient = np.zeros(int(begins[-1]), np.int64), np.ones(int(begins[-1]))
    index[begins[:-1]] = table.group[rows]
    index[begins[:-1][uses_nodes] + 1] = groups + resource[uses_nodes]
    coefficient[begins[:-1][uses_nodes] + 1] = table.size[rows][uses_nodes]
    objective = -dual.reduced_cost[rows]
    scale = float(np.mean(-objective)) or 1.0
    unused = np.arange(resources)
    model = LinearProgram(
        cost=np.concatenate([objective, -dual.prices]) / scale,
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
        solution = maximise(model, time_limit_s=time_limit_s)
    except SolverError as error:  # the bound becomes weaker; the plan does not depend on it
        log.warning("The allocation continues with a weaker bound. %s", error)
        return None
    if solution.x is None or solution.duals is None:
        return None
    prices = np.maximum(0.0, dual.prices + solution.duals[groups:] * scale)
    return dual.bound + solution.objective * scale, solution.x[:n], prices
