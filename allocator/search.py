"""The search for the exact solution: makes a first plan by greedy moves, and improves it until it
is proven optimal or the time is up.

:func:`fill` and :func:`repair` move jobs between sizes, to use free capacity and to bring a plan
within the capacity. They decide the plans from which the search begins (:func:`first_plan`), which
are the result only if there is no time for the search.

:func:`improve` decides in each iteration which rows of the table can be part of a better plan
(those whose reduced cost is below the duality gap of the incumbent), and passes them to one of the
solvers in :mod:`allocator.reduced_problem`. While they are many, it first solves a working set
of those with the lowest reduced costs: the better incumbent usually rules out most of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from allocator import reduced_problem
from allocator.prices import Dual
from allocator.table import IDLE, BidTable, Floats, Ints, Mask, undominated


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


_FIRST_WORKING_ROWS = 300
"""Rows solved first if more than three times as many are open."""
_FILL_ROWS = 4000
"""Rows to which jobs may move when a plan is filled."""
_CHEAP_UPDATES = 4e6
"""State updates (about 10 ms) that the dynamic program may use before HiGHS gets the problem."""
_MAX_UPDATES = 4e8
"""State updates that it may use if the problem would take HiGHS long."""
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
    smallest of each group and pool, and those of ``feasible``.
    """
    number = min(len(table.size), 8 * len(table.starts))
    mask = feasible > 0
    mask[np.argpartition(dual.reduced_cost, number - 1)[:number]] = True
    mask[table.starts] = True
    mask[1:] |= (table.resource[1:] != table.resource[:-1]) | (table.group[1:] != table.group[:-1])
    return np.flatnonzero(mask)


def polish(table: BidTable, dual: Dual, plan: Ints) -> Ints:
    """Optimise one pool of nodes after the other with the dynamic program: the jobs in the pool,
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
        in_pool = (
            is_open & movable[table.group] & ((table.resource == c) | (table.resource == IDLE))
        )
        if not in_pool.any():
            continue
        working_set = _cheapest(table, dual, in_pool, _FIRST_WORKING_ROWS) & in_pool | (plan > 0)
        solution = reduced_problem.by_dynamic_program(
            table,
            dual,
            reduced_problem.reduce(table, dual, working_set),
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
    working_rows, is_filled = _FIRST_WORKING_ROWS, False
    several_pools = len(table.capacity) > 1
    one_pool = dynamic_program and not several_pools
    copies = table.count[table.group] if one_pool else np.ones(len(table.group))
    while incumbent_gap > gap_bound + tolerance:
        is_open = dual.reduced_cost < incumbent_gap - dual.noise
        if not is_filled:
            rows = _lowest(np.flatnonzero(is_open), dual.reduced_cost, _FILL_ROWS)
            plan, is_filled = fill(table, dual, plan, rows), True
            if several_pools and dynamic_program:
                plan = polish(table, dual, plan)
            incumbent_gap = dual.duality_gap(table, plan)
            continue
        time_left_s = remaining_s()
        if time_left_s <= 0:
            break
        is_open = undominated(table, is_open)
        open_rows = float(copies[is_open].sum())
        max_rows = min(_MAX_MILP_ROWS, max(500, int(_MILP_ROWS_PER_SECOND * time_left_s)))
        take_all = open_rows <= 3 * min(working_rows, max_rows) + float(copies[table.starts].sum())
        working_rows = min(working_rows, max_rows)
        chosen = is_open if take_all else _cheapest(table, dual, is_open, working_rows)
        working_set = chosen | (plan > 0)
        excluded_costs = dual.reduced_cost[is_open & ~working_set]
        complete, excluded_bound = (
            not len(excluded_costs),
            float(excluded_costs.min(initial=np.inf)),
        )
        problem = reduced_problem.reduce(table, dual, working_set)
        reduced_size, cutoff = (len(problem.count), len(problem.rows)), incumbent_gap
        solution = None
        if one_pool:
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
        if not complete and working_rows >= max_rows:
            break
        working_rows *= 4
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
    working_set = mask & (dual.reduced_cost <= dual.noise)
    rows = np.flatnonzero(mask & ~working_set)
    rows = _lowest(rows, dual.reduced_cost, 12 * number)
    costs = dual.reduced_cost[rows]
    working_set[rows[np.argsort(costs, kind="stable")[: number // 2]]] = True
    order = np.lexsort((costs, table.group[rows]))
    rows, costs = rows[order], costs[order]
    group = table.group[rows]
    first_three = np.arange(len(rows)) - np.searchsorted(group, group) < 3
    rows, costs = rows[first_three], costs[first_three]
    working_set[rows[np.argsort(costs, kind="stable")[: number // 2]]] = True
    return working_set
