"""The exact search: improves a first plan until it is proven optimal or the time is up.

Decides in each iteration which rows of the table can be part of a better plan (those whose reduced
cost is below the duality gap of the incumbent), and passes them to one of the solvers in
:mod:`allocator.reduced_problem`. While they are many, the search first solves a pool of those with
the lowest reduced costs: the better incumbent usually rules out most of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from allocator import reduced_problem
from allocator.moves import fill, repair
from allocator.prices import Dual
from allocator.table import IDLE, BidTable, Floats, Ints, Mask, undominated

_FIRST_POOL_ROWS = 300
"""Rows solved first if more than three times as many are open."""
_FILL_ROWS = 4000
"""Rows to which jobs may move when a plan is filled."""
_CHEAP_UPDATES = 4e6
"""State updates (about 10 ms) that the dynamic program may use before HiGHS gets the problem."""
_MAX_UPDATES = 4e8
"""The same for a problem that would take HiGHS long."""
_LARGE_PROBLEM_ROWS = 3000
"""From this number of rows on, a problem would take HiGHS long."""
_UPDATES_PER_SECOND = 3e8
_MAX_MILP_ROWS, _MILP_ROWS_PER_SECOND = 10_000, 4_000
"""The largest problem for HiGHS, at most and for each second of remaining time. On larger ones its
presolve does not check the time limit often enough.
"""


@dataclass(frozen=True)
class SearchResult:
    """The best plan and its proof."""

    plan: Ints
    """Members by row."""
    duality_gap: float
    """The Lagrangian bound minus the plan's value."""
    gap_bound: float
    """A proven lower bound on the duality gap of every plan."""
    tolerance: float
    """Maximum difference between the gap of a plan accepted as optimal and ``gap_bound``."""
    proof: str
    """The step that closed the gap: ``bound``, ``dp`` or ``highs``."""
    reduced_size: tuple[int, int]
    """(groups, rows) of the last reduced problem."""


def first_plan(table: BidTable, dual: Dual, relaxed: Ints, feasible: Ints) -> Ints:
    """Return a feasible plan close to the solution of the relaxation.

    Args:
        table: the options of all groups.
        dual: prices and reduced costs.
        relaxed: the plan of the relaxation, which may exceed the capacity.
        feasible: a feasible plan, the start if ``relaxed`` cannot be repaired.

    Returns:
        Members by row, feasible, with its free capacity filled.
    """
    if table.fits(relaxed):
        return relaxed
    rows = _move_targets(table, dual, feasible)
    repaired = repair(table, dual, relaxed, rows)
    return fill(
        table, dual, feasible if repaired is None else repaired, rows, 4 * len(table.starts)
    )


def fix_by_reduced_cost(table: BidTable, dual: Dual, plan: Ints) -> tuple[BidTable, Dual, Ints]:
    """Remove the rows that no better plan can use.

    Args:
        table: the options of all groups.
        dual: prices and reduced costs.
        plan: a feasible plan, members by row; its rows stay.

    Returns:
        All three with only the remaining rows.
    """
    mask = (dual.reduced_cost < dual.duality_gap(table, plan) - dual.noise) | (plan > 0)
    return table.select(mask), replace(dual, reduced_cost=dual.reduced_cost[mask]), plan[mask]


def _move_targets(table: BidTable, dual: Dual, feasible: Ints) -> Ints:
    """Return the rows for :func:`repair` and :func:`fill`: those with the lowest reduced costs, the
    smallest of each group and class, and those of ``feasible``.
    """
    number = min(len(table.size), 8 * len(table.starts))
    mask = feasible > 0
    mask[np.argpartition(dual.reduced_cost, number - 1)[:number]] = True
    mask[table.starts] = True
    mask[1:] |= (table.resource[1:] != table.resource[:-1]) | (table.group[1:] != table.group[:-1])
    return np.flatnonzero(mask)


def polish(table: BidTable, dual: Dual, plan: Ints) -> Ints:
    """Optimise one class of nodes after the other with the dynamic program: the jobs on the class,
    together with the jobs without nodes.

    Args:
        table: the options of all groups.
        dual: prices and reduced costs.
        plan: a feasible plan, members by row.

    Returns:
        A feasible plan that is at least as good.
    """
    for c in range(len(table.capacity)):
        duality_gap = dual.duality_gap(table, plan)
        is_open = dual.reduced_cost < duality_gap - dual.noise
        movable = np.zeros(len(table.starts), np.bool_)
        in_use = np.flatnonzero(plan)
        movable[table.group[in_use]] = True
        movable[
            table.group[in_use[(table.resource[in_use] != c) & (table.resource[in_use] != IDLE)]]
        ] = False
        of_class = (
            is_open & movable[table.group] & ((table.resource == c) | (table.resource == IDLE))
        )
        if not of_class.any():
            continue
        pool = _cheapest(table, dual, of_class, _FIRST_POOL_ROWS) & of_class | (plan > 0)
        solution = reduced_problem.by_dynamic_program(
            table,
            dual,
            reduced_problem.reduce(table, dual, pool),
            cutoff=duality_gap - dual.noise,
            max_updates=_CHEAP_UPDATES,
            resource=c,
        )
        if solution is not None and solution.plan is not None and table.fits(solution.plan):
            plan = solution.plan
    return plan


def improve(
    table: BidTable,
    dual: Dual,
    plan: Ints,
    *,
    remaining_s: Callable[[], float],
    gap: float,
    dynamic_program: bool,
) -> SearchResult:
    """Search for the plan with the smallest duality gap.

    Args:
        table: the options of all groups.
        dual: prices and reduced costs.
        plan: a feasible plan, the first incumbent.
        remaining_s: returns the remaining time, seconds.
        gap: relative gap at which to stop.
        dynamic_program: whether the dynamic program may be used where it applies.

    Returns:
        The incumbent at the end of the search or of the time.
    """
    incumbent_gap = dual.duality_gap(table, plan)
    tolerance = max(dual.noise, gap * abs(dual.bound - incumbent_gap))
    gap_bound, proof, reduced_size = 0.0, "bound", (0, 0)
    pool_rows, is_filled = _FIRST_POOL_ROWS, False
    several_classes = len(table.capacity) > 1
    one_class = dynamic_program and not several_classes
    copies = table.count[table.group] if one_class else np.ones(len(table.group))
    while incumbent_gap > gap_bound + tolerance:
        is_open = dual.reduced_cost < incumbent_gap - dual.noise
        if not is_filled:
            rows = _lowest(np.flatnonzero(is_open), dual.reduced_cost, _FILL_ROWS)
            plan, is_filled = fill(table, dual, plan, rows), True
            if several_classes and dynamic_program:
                plan = polish(table, dual, plan)
            incumbent_gap = dual.duality_gap(table, plan)
            continue
        time_left_s = remaining_s()
        if time_left_s <= 0:
            break
        is_open = undominated(table, is_open)
        open_rows = float(copies[is_open].sum())
        max_rows = min(_MAX_MILP_ROWS, max(500, int(_MILP_ROWS_PER_SECOND * time_left_s)))
        take_all = open_rows <= 3 * min(pool_rows, max_rows) + float(copies[table.starts].sum())
        pool_rows = min(pool_rows, max_rows)
        pool = (is_open if take_all else _cheapest(table, dual, is_open, pool_rows)) | (plan > 0)
        excluded_costs = dual.reduced_cost[is_open & ~pool]
        complete, excluded_bound = (
            not len(excluded_costs),
            float(excluded_costs.min(initial=np.inf)),
        )
        problem = reduced_problem.reduce(table, dual, pool)
        reduced_size, cutoff = (len(problem.count), len(problem.rows)), incumbent_gap
        solution = None
        if one_class:
            is_large = len(problem.rows) > _LARGE_PROBLEM_ROWS
            solution = reduced_problem.by_dynamic_program(
                table,
                dual,
                problem,
                cutoff=incumbent_gap - dual.noise,
                max_updates=min(
                    _MAX_UPDATES if is_large else _CHEAP_UPDATES, _UPDATES_PER_SECOND * time_left_s
                ),
            )
            proof = "dp"
        if solution is None:
            proof = "highs"
            solution = reduced_problem.by_milp(
                table,
                dual,
                problem,
                cutoff=incumbent_gap,
                time_limit_s=time_left_s if complete else 0.3 * time_left_s,
                tolerance=tolerance,
                incumbent=plan,
            )
        if solution.plan is not None:
            plan_gap = dual.duality_gap(table, solution.plan)
            if plan_gap < incumbent_gap - dual.noise:
                plan, incumbent_gap = solution.plan, plan_gap
        # HiGHS is exact to 1e-9 of the cutoff: solve again if the gap is far below it.
        imprecise = proof == "highs" and incumbent_gap < 1e-3 * cutoff
        problem_bound = (
            incumbent_gap
            if solution.proven and not imprecise
            else min(solution.gap_bound, incumbent_gap - 1e-9 * cutoff)
        )
        gap_bound = max(gap_bound, min(problem_bound, excluded_bound))
        if complete and not imprecise:
            break
        if not complete and pool_rows >= max_rows:
            break
        pool_rows *= 4
    return SearchResult(
        plan, incumbent_gap, min(gap_bound, incumbent_gap), tolerance, proof, reduced_size
    )


def _lowest(rows: Ints, reduced_cost: Floats, number: int) -> Ints:
    """Return the ``number`` of ``rows`` with the lowest reduced costs, ascending."""
    if len(rows) <= number:
        return rows
    return np.sort(rows[np.argpartition(reduced_cost[rows], number)[:number]])


def _cheapest(table: BidTable, dual: Dual, mask: Mask, number: int) -> Mask:
    """Return the best row of each group, and about ``number`` other rows of ``mask`` with low
    reduced costs: half of them from any group, half with at most three from each group.
    """
    pool = mask & (dual.reduced_cost <= dual.noise)
    rows = np.flatnonzero(mask & ~pool)
    rows = _lowest(rows, dual.reduced_cost, 12 * number)
    costs = dual.reduced_cost[rows]
    pool[rows[np.argsort(costs, kind="stable")[: number // 2]]] = True
    order = np.lexsort((costs, table.group[rows]))
    rows, costs = rows[order], costs[order]
    group = table.group[rows]
    first_three = np.arange(len(rows)) - np.searchsorted(group, group) < 3
    rows, costs = rows[first_three], costs[first_three]
    pool[rows[np.argsort(costs, kind="stable")[: number // 2]]] = True
    return pool
