"""The reduced problem: the options that reduced-cost fixing leaves open, and two exact solvers.

Both solvers minimise the **duality gap** of the plan (see :mod:`allocator.prices`) instead of
maximising its value: gaps are small differences, so full precision does not depend on the unit of
the values.

* :func:`by_dynamic_program` is a dynamic program over node counts. States whose gap reaches that of
  the incumbent are pruned. It applies to one pool of nodes, is fast while few states survive, and
  gives up otherwise.
* :func:`by_milp` is HiGHS, for any number of pools, with one integer variable for each option:
  how many jobs of a group take it.

Does not decide which rows stay open (:mod:`allocator.search`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from allocator.highs import LinearProgram, SolverError, maximise
from allocator.prices import Dual
from allocator.table import IDLE, BidTable, Floats, Ints, Mask

log = logging.getLogger(__name__)

_MAX_STATES = 20_000_000
"""States stored to reconstruct the plan (8 bytes each)."""


@dataclass(frozen=True)
class ReducedProblem:
    """The open part of a table."""

    rows: Ints
    """Open rows of the table, by group, ascending."""
    group: Ints
    """Open group (0, 1, …) of each open row."""
    count: Ints
    """Members of each open group."""
    fixed_plan: Ints
    """The plan (members by row of the table) of the groups with only one row left."""
    residual: Floats
    """Units of each resource that ``fixed_plan`` leaves."""
    fixed_cost: float
    """Sum of the reduced costs of ``fixed_plan``."""


@dataclass(frozen=True)
class ReducedSolution:
    """The plan of a reduced problem with the smallest duality gap."""

    plan: Ints | None
    """Members by row of the table; None if no plan has a gap below the cutoff."""
    proven: bool
    """Whether it is proven that no plan of the problem has a smaller gap (or, without a plan, one
    below the cutoff).
    """
    gap_bound: float = 0.0
    """If not proven: a lower bound on the duality gap of every plan of the problem."""


def reduce(table: BidTable, dual: Dual, mask: Mask) -> ReducedProblem:
    """Build the problem with some of the rows.

    Args:
        table: the options of all groups.
        dual: prices and reduced costs.
        mask: the rows to include, at least one of every group.
    """
    rows = np.flatnonzero(mask)
    group = table.group[rows]
    rows_in_group = np.bincount(group, minlength=len(table.starts))
    is_fixed = rows_in_group[group] == 1
    fixed_plan = np.zeros(len(table.size), np.int64)
    fixed_plan[rows[is_fixed]] = table.count[group[is_fixed]].astype(np.int64)
    is_open = rows_in_group > 1
    new_group = np.cumsum(is_open) - 1
    rows, group = rows[~is_fixed], new_group[group[~is_fixed]]
    residual = table.capacity - table.usage(fixed_plan)
    in_use = np.flatnonzero(fixed_plan)
    count = table.count[is_open].astype(np.int64)
    fixed_cost = float(fixed_plan[in_use] @ dual.reduced_cost[in_use])
    return ReducedProblem(rows, group, count, fixed_plan, residual, fixed_cost)


def by_dynamic_program(
    table: BidTable,
    dual: Dual,
    problem: ReducedProblem,
    cutoff: float,
    max_updates: float,
    resource: int = 0,
) -> ReducedSolution | None:
    """Solve a problem whose open rows all use the same resource.

    A stage is one job. A state is the number of nodes beyond the smallest open size of each job. A
    state is pruned when its reduced costs reach the cutoff, or when the price of the nodes that no
    later stage can use reaches it.

    Args:
        table: the options of all groups.
        dual: prices and reduced costs.
        problem: the open rows.
        cutoff: look only for plans with a duality gap below this.
        max_updates: give up when more state updates are needed.
        resource: the resource of the open rows.

    Returns:
        The solution; None if it needs more than ``max_updates`` or too much memory.
    """
    starts = np.searchsorted(problem.group, np.arange(len(problem.count) + 1))
    sizes, reduced_cost = table.size[problem.rows], dual.reduced_cost[problem.rows]
    smallest = (
        np.minimum.reduceat(sizes, starts[:-1]) if len(problem.count) else np.zeros(0, np.int64)
    )
    spans = (np.maximum.reduceat(sizes, starts[:-1]) - smallest) if len(problem.count) else smallest
    residual = round(float(problem.residual[resource] - problem.count @ smallest))
    price = float(dual.prices[resource])
    fixed_gap = problem.fixed_cost + float(
        np.delete(dual.prices, resource) @ np.delete(problem.residual, resource)
    )
    if residual < 0:
        return ReducedSolution(None, True)
    stages = np.repeat(np.arange(len(problem.count)), problem.count)
    stages = stages[np.argsort(spans[stages], kind="stable")]
    later_spans = np.concatenate([np.cumsum(spans[stages][::-1])[::-1], [0]])
    # The most nodes that may stay unused.
    slack = int(cutoff / price) if price > 0 and cutoff / price < residual else residual
    history: list[tuple[int, Floats, int]] = []
    offset, best = 0, np.array([fixed_gap])
    updates, states = 0.0, 0
    for stage, g in enumerate(stages.tolist()):
        history.append((offset, best, g))
        group_rows = range(int(starts[g]), int(starts[g + 1]))
        new_offset = max(offset, residual - slack - int(later_spans[stage + 1]))
        width = min(residual, offset + len(best) - 1 + int(spans[g])) - new_offset + 1
        if width <= 0:
            return ReducedSolution(None, True)
        updates += (width + 500.0) * len(group_rows)
        states += width
        if updates > max_updates or states > _MAX_STATES:
            return None
        new_best = np.full(width, np.inf)
        for row in group_rows:
            shift = offset + int(sizes[row] - smallest[g]) - new_offset
            begin, end = max(0, shift), min(width, shift + len(best))
            if begin < end:
                np.minimum(
                    new_best[begin:end],
                    best[begin - shift : end - shift] + reduced_cost[row],
                    out=new_best[begin:end],
                )
        alive = new_best < cutoff
        first = int(np.argmax(alive))
        if not alive[first]:
            return ReducedSolution(None, True)
        last = width - int(np.argmax(alive[::-1]))
        offset, best = new_offset + first, new_best[first:last]
    unused = residual - (offset + np.arange(len(best)))
    gaps = best + price * unused
    state = int(np.argmin(gaps))
    if not gaps[state] < cutoff:
        return ReducedSolution(None, True)
    plan = problem.fixed_plan.copy()
    nodes, cost = offset + state, best[state]
    for offset, best, g in reversed(history):
        for row in range(int(starts[g]), int(starts[g + 1])):
            before = nodes - int(sizes[row] - smallest[g]) - offset
            if 0 <= before < len(best) and best[before] + reduced_cost[row] == cost:
                plan[problem.rows[row]] += 1
                nodes, cost = before + offset, best[before]
                break
    return ReducedSolution(plan, True)


def by_milp(
    table: BidTable,
    dual: Dual,
    problem: ReducedProblem,
    cutoff: float,
    *,
    time_limit_s: float,
    tolerance: float,
    incumbent: Ints | None,
) -> ReducedSolution:
    """Solve a problem in HiGHS.

    Minimises ``(reduced_cost·n + prices·unused) / cutoff`` over the members n by row and the unused
    nodes. In this unit the gap of the incumbent is 1, and HiGHS' tolerances (1e-9) are far below
    any difference that matters.

    Args:
        table: the options of all groups.
        dual: prices and reduced costs.
        problem: the open rows.
        cutoff: the duality gap of the incumbent.
        time_limit_s: time limit, seconds.
        tolerance: stop when the gap is proven to be within this of the smallest.
        incumbent: the best known plan, all of whose rows are in the problem.

    Returns:
        The best plan at the end of the run.
    """
    n, groups, resources = len(problem.rows), len(problem.count), len(problem.residual)
    size = table.size[problem.rows].astype(np.float64)
    resource = table.resource[problem.rows]
    uses_nodes = resource != IDLE
    entries = 1 + uses_nodes.astype(np.int64)
    begins = np.concatenate(
        [[0], np.cumsum(entries), np.cumsum(entries)[-1:] + np.arange(1, resources + 1)]
    )
    total = int(begins[-1])
    index, coefficient = np.zeros(total, np.int64), np.ones(total)
    index[begins[:n]] = problem.group
    index[begins[:n][uses_nodes] + 1] = groups + resource[uses_nodes]
    coefficient[begins[:n][uses_nodes] + 1] = size[uses_nodes]
    index[begins[n : n + resources]] = groups + np.arange(resources)
    limits = np.concatenate([problem.count.astype(np.float64), problem.residual])
    model = LinearProgram(
        cost=-np.concatenate([dual.reduced_cost[problem.rows], dual.prices]) / cutoff,
        lower=np.zeros(n + resources),
        upper=np.concatenate(
            [problem.count[problem.group].astype(np.float64), np.full(resources, np.inf)]
        ),
        integral=np.concatenate([np.ones(n, np.bool_), np.zeros(resources, np.bool_)]),
        starts=begins,
        rows=index,
        coefficients=coefficient,
        row_lower=limits,
        row_upper=limits,
    )
    start = None
    if incumbent is not None:
        start = np.concatenate(
            [incumbent[problem.rows].astype(np.float64), table.capacity - table.usage(incumbent)]
        )
    try:
        solution = maximise(
            model, time_limit_s=time_limit_s, absolute_gap=tolerance / cutoff, start=start
        )
    except SolverError as error:  # the plan remains; only its proof is missing
        log.warning("The allocation continues without an optimality proof. %s", error)
        return ReducedSolution(None, False)
    gap_bound = 0.0
    if np.isfinite(solution.bound):
        gap_bound = max(0.0, problem.fixed_cost - solution.bound * cutoff)
    plan = None
    if solution.x is not None:
        plan = problem.fixed_plan.copy()
        plan[problem.rows] = np.rint(solution.x[:n]).astype(np.int64)
    if plan is None or not table.fits(plan):
        return ReducedSolution(None, False, gap_bound)
    return ReducedSolution(plan, solution.optimal and tolerance <= dual.noise, gap_bound)
