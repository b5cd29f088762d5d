"""The exact solution of the allocation MILP (section 7 of the design), a multiple-choice knapsack
problem with one capacity for each pool of nodes.

    maximise  sum over jobs j, options o of value(j,o) · y(j,o)
    subject to  each job takes one option (or none),  nodes of each pool <= its capacity,  y binary

Decides how many nodes of which pool each job gets. It does not choose the nodes
(:mod:`allocator.placement`). The steps of :func:`solve`: bids become arrays
(:mod:`allocator.table`), prices bound every plan (:mod:`allocator.prices`, :func:`relax`), greedy
moves make a first plan, and a search solves the few options that the bound leaves open (both
:mod:`allocator.search`), in HiGHS or with a dynamic program (:mod:`allocator.reduced_problem`).

:func:`fewest_drops` decides how many must-run jobs the plan has to drop, regardless of value, and
returns one assignment that drops no more. It does not decide which ones: the search chooses them by
value.

:func:`relax` solves the LP relaxation over several pools of nodes, by column generation in HiGHS.
It decides the prices where coordinate descent gets stuck: with several pools the dual function is
not smooth, and a single price cannot always be improved alone. The master LP has a working set of
rows. Its duals are new prices; rows with reduced cost 0 at these prices join it, until the value of
the LP equals the bound, so that no further row can change it. The last basic solution becomes a
plan: all but a few jobs have a whole size in it.

:func:`prefer_current` and :func:`prefer_earlier` break ties between optimal plans, of which an
exact solver returns any: running jobs first, then the order of arrival. A plan that is no better
than the current one changes nothing, and an assignment goes to the earlier of two jobs to which it
is equally valuable. They never change the value of a plan. Jobs with equal bids are ordered before,
in :func:`allocator.table.to_sizes`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from allocator import prices, search, table
from allocator.bids import (
    Allocation,
    Assignment,
    Bid,
    PoolT,
    SizeValues,
    check,
    nodes_in_use,
    plan_value,
    relative_gap,
)
from allocator.highs import LinearProgram, SolverError, maximise
from allocator.prices import Dual, dual_at
from allocator.table import IDLE, BidTable, Floats, Ints, Mask

_EQUAL = 1e-12
"""Relative difference up to which two values are equal: rounding in double precision."""
_NEARLY_EQUAL = 1e-9
"""The same for values that accumulate the rounding of up to a thousand exchanges."""


def prefer_current(
    bids: Sequence[Bid[PoolT]],
    capacity: Mapping[PoolT, int],
    sizes: Mapping[str, Assignment[PoolT]],
) -> dict[str, Assignment[PoolT]]:
    """Return the current plan if it is as valuable as ``sizes``.

    Args:
        bids: of all jobs.
        capacity: pool -> nodes.
        sizes: job -> (pool, size), a feasible plan.

    Returns:
        The current assignments of all jobs if they are feasible, drop no must-run job that
        ``sizes`` places, and have the same value; else ``sizes``.
    """
    current = {bid.job: bid.current for bid in bids if bid.current is not None}
    changed = [bid for bid in bids if bid.current != sizes.get(bid.job)]
    values_before = [bid.value(bid.current) for bid in changed]
    values_after = [bid.value(sizes.get(bid.job)) or 0.0 for bid in changed]
    finite_before = [value for value in values_before if value is not None and value > -math.inf]
    fits = all(nodes <= capacity.get(pool, 0) for pool, nodes in nodes_in_use(current).items())
    rounding = _EQUAL * sum(map(abs, values_after))
    if (
        fits
        and len(finite_before) == len(changed)
        and sum(finite_before) >= sum(values_after) - rounding
    ):
        return current
    return dict(sizes)


def prefer_earlier(
    bids: Sequence[Bid[PoolT]], sizes: Mapping[str, Assignment[PoolT]]
) -> dict[str, Assignment[PoolT]]:
    """Give each new assignment to the first job to which it is equally valuable.

    Only assignments of jobs that do not run yet are exchanged. Jobs that ``sizes`` stops come
    before jobs that wait.

    Args:
        bids: of all jobs, in the order of arrival.
        sizes: job -> (pool, size).

    Returns:
        A plan of the same value, jobs in the order of ``bids``.
    """
    exchanged = dict(sizes)
    new = [index for index, bid in enumerate(bids) if bid.job in exchanged and bid.current is None]
    waiting = [
        (bid.current is None, index) for index, bid in enumerate(bids) if bid.job not in exchanged
    ]
    if new and waiting:
        _exchange(bids, exchanged, np.array(new), sorted(waiting))
    return {bid.job: exchanged[bid.job] for bid in bids if bid.job in exchanged}


def _exchange(
    bids: Sequence[Bid[PoolT]],
    sizes: dict[str, Assignment[PoolT]],
    owner: Ints,
    waiting: list[tuple[bool, int]],
) -> None:
    """Pass assignments on to earlier jobs, in place; each time the last owner gives its own up.

    Args:
        bids: of all jobs.
        sizes: the plan to change.
        owner: indices in ``bids`` of the jobs whose assignments may be passed on.
        waiting: (whether the job does not run, index in ``bids``) of the jobs without nodes; a
            heap.
    """
    assignments = [sizes[bids[index].job] for index in owner]
    size = np.array([nodes for _, nodes in assignments])
    in_pool = {pool: np.array([pool == p for p, _ in assignments]) for pool in dict(assignments)}
    must_run = np.array([bids[index].must_run for index in owner])
    values = [
        bids[index].value(assignment) or 0.0
        for index, assignment in zip(owner, assignments, strict=True)
    ]
    idle_values = np.array([bids[index].idle_value for index in owner])
    gain = np.array(values) - np.where(must_run, 0.0, idle_values)
    earlier = [job for job in waiting if job < (True, owner.max())]
    waiting = _candidates(bids, earlier, in_pool, size, must_run, gain)
    rejected: set[tuple[float, tuple[tuple[PoolT, SizeValues], ...]]] = set()
    while waiting and waiting[0] < (True, owner.max()):
        is_new, index = heappop(waiting)
        bid = bids[index]
        options = (bid.idle_value, tuple(bid.options.items()))
        if options in rejected:
            continue
        gains = _gains([bid], in_pool, size)[0]
        equal = (owner >= 0) & (must_run == bid.must_run) & (gains >= gain - _EQUAL * np.abs(gain))
        column = int(np.argmax(np.where(equal, owner, -1)))
        last = int(owner[column])
        if not equal[column] or (is_new and last < index):
            rejected.add(options)  # later jobs with the same options find nothing either
            continue
        sizes[bid.job] = sizes.pop(bids[last].job)
        # A running job keeps what it got (-1): this assignment is not passed on again.
        owner[column], gain[column] = index if is_new else -1, gains[column]
        heappush(waiting, (True, last))


def _candidates(
    bids: Sequence[Bid[PoolT]],
    waiting: list[tuple[bool, int]],
    in_pool: Mapping[PoolT, Mask],
    size: Ints,
    must_run: Mask,
    gain: Floats,
) -> list[tuple[bool, int]]:
    """Return the jobs of ``waiting`` to which some assignment is as valuable as to its owner;
    usually none. The gain of an assignment changes only by rounding when it is passed on, so the
    other jobs need no second check.
    """
    rows = [bids[index] for _, index in waiting]
    same_kind = must_run == np.array([bid.must_run for bid in rows])[:, None]
    as_good = _gains(rows, in_pool, size) >= gain - _NEARLY_EQUAL * np.abs(gain)
    is_candidate = (same_kind & as_good).any(axis=1)
    return [job for job, yes in zip(waiting, is_candidate, strict=True) if yes]


def _gains(bids: Sequence[Bid[PoolT]], in_pool: Mapping[PoolT, Mask], size: Ints) -> Floats:
    """Return the value that each job (row) gains over its idle value by each assignment (column);
    -inf where its bid does not offer it.

    Args:
        bids: of the jobs.
        in_pool: pool -> which assignments are in it.
        size: nodes of each assignment.
    """
    gains = np.full((len(bids), len(size)), -np.inf)
    rows_of: dict[tuple[PoolT, int], list[int]] = {}  # rows whose bids share an array of sizes
    for row, bid in enumerate(bids):
        for pool, options in bid.options.items():
            if pool in in_pool and len(options.sizes):
                rows_of.setdefault((pool, id(options.sizes)), []).append(row)
    for (pool, _), rows in rows_of.items():
        sizes = bids[rows[0]].options[pool].sizes
        index = np.minimum(np.searchsorted(sizes, size), len(sizes) - 1)
        offered = np.flatnonzero(in_pool[pool] & (sizes[index] == size))
        values = [bids[row].options[pool].values[index[offered]] for row in rows]
        gains[np.array(rows)[:, None], offered] = values
    idle = np.array([0.0 if bid.must_run else bid.idle_value for bid in bids], np.float64)
    over_idle: NDArray[np.float64] = gains - idle[:, None]
    return over_idle


def fewest_drops(
    bids: Sequence[Bid[PoolT]], capacity: Mapping[PoolT, int], *, time_limit_s: float
) -> tuple[int, dict[str, Assignment[PoolT]]]:
    """Place as many must-run jobs as possible, each at its smallest size.

    First fit, with the jobs that can use the fewest pools and then the smallest jobs first, is
    optimal in one pool of nodes. In several pools, if it leaves a job out, an assignment MILP in
    HiGHS decides.

    Args:
        bids: of all jobs; those that do not have to run are ignored.
        capacity: pool -> nodes.
        time_limit_s: of the MILP, seconds. Its incumbent at that time is accepted.

    Returns:
        (the number of jobs to drop, the assignments of the others). Jobs that would not fit on the
        empty machine are in neither.
    """
    pools = list(capacity)
    number_of = {pool: number for number, pool in enumerate(pools)}
    options: dict[str, list[tuple[int, int]]] = {}
    for bid in bids:
        if bid.must_run:
            fitting = [
                (int(o.sizes[0]), number_of[pool])
                for pool, o in bid.options.items()
                if len(o.sizes) and o.sizes[0] <= capacity.get(pool, 0)
            ]
            if fitting:
                options[bid.job] = sorted(fitting)
    free = [int(nodes) for nodes in capacity.values()]
    placed: dict[str, tuple[int, int]] = {}
    for job in sorted(options, key=lambda job: (len(options[job]), options[job])):
        first_fit = next(
            ((number, size) for size, number in options[job] if size <= free[number]), None
        )
        if first_fit:
            placed[job] = first_fit
            free[first_fit[0]] -= first_fit[1]
    if len(placed) < len(options) and any(len(choices) > 1 for choices in options.values()):
        optimal = _by_milp(options, list(capacity.values()), time_limit_s)
        if len(optimal) > len(placed):
            placed = optimal
    sizes = {job: (pools[number], size) for job, (number, size) in placed.items()}
    return len(options) - len(placed), sizes


def _by_milp(
    options: Mapping[str, list[tuple[int, int]]], capacity: Sequence[int], time_limit_s: float
) -> dict[str, tuple[int, int]]:
    """Return job -> (number of its pool, size) in a plan that places the maximum number of jobs.

    Args:
        options: job -> its (smallest size, number of the pool) in each pool that it can use.
        capacity: nodes of each pool.
        time_limit_s: time limit of HiGHS, seconds.
    """
    jobs = list(options)
    triples = [(j, k, c) for j, job in enumerate(jobs) for k, c in options[job]]
    n = len(triples)
    rows = np.array([row for j, _, c in triples for row in (j, len(jobs) + c)])
    coefficients = np.array([x for _, k, _ in triples for x in (1.0, float(k))])
    model = LinearProgram(
        cost=np.ones(n),
        lower=np.zeros(n),
        upper=np.ones(n),
        integral=np.ones(n, np.bool_),
        starts=2 * np.arange(n + 1),
        rows=rows,
        coefficients=coefficients,
        row_lower=np.full(len(jobs) + len(capacity), -np.inf),
        row_upper=np.array([1.0] * len(jobs) + [float(nodes) for nodes in capacity]),
    )
    solution = maximise(model, time_limit_s=time_limit_s, absolute_gap=0.999)
    if solution.x is None:
        return {}
    return {jobs[j]: (c, k) for (j, k, c), x in zip(triples, solution.x, strict=True) if x > 0.5}


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
    working_size = min(len(table.size), 4 * len(table.starts) + 64)
    working_set = feasible > 0
    working_set[np.argpartition(dual.reduced_cost, working_size - 1)[:working_size]] = True
    working_set[dual.reduced_cost <= dual.noise] = True
    for _ in range(_MAX_ITERATIONS):
        time_limit_s = remaining_s()
        if time_limit_s <= 0:
            break
        rows = np.flatnonzero(working_set)
        solution = _lp(table, dual, rows, time_limit_s)
        if solution is None:
            break
        lp_value, members, prices = solution
        plan = _rounded(table, rows, members)
        # Stabilisation: the duals of a small LP oscillate, so the midpoint to the best prices is
        # evaluated as well.
        for current in (dual_at(table, prices), dual_at(table, 0.5 * (prices + best.prices))):
            working_set[current.reduced_cost <= current.noise] = True
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


__all__ = ["Allocation", "MonotonicClock", "solve"]

MonotonicClock = Callable[[], float]
"""Seconds on a clock that never goes back, for example :func:`time.perf_counter`."""


def no_clock() -> float:
    """Return 0: a clock that stands still, for callers without one."""
    return 0.0


def solve(
    bids: Sequence[Bid[PoolT]],
    capacity: Mapping[PoolT, int],
    *,
    clock: MonotonicClock = no_clock,
    time_limit_s: float = 2.0,
    gap: float = 0.0,
    dynamic_program: bool = True,
) -> Allocation[PoolT]:
    """Return the plan that maximises the sum of the bids' values within ``capacity``.

    Must-run jobs (idle value -inf) come first: the plan drops as few of them as possible. Among the
    plans that drop as few, the one with the highest value wins; a dropped job counts 0. Among plans
    of equal value, running jobs keep their nodes and waiting jobs are served in the order of
    ``bids``.

    Args:
        bids: of all jobs, in the order of arrival.
        capacity: pool -> nodes.
        clock: tells the time, seconds. Without one the search ends only when the plan is proven
            optimal: ``time_limit_s`` then limits single runs of HiGHS, and ``solve_s`` is 0.
        time_limit_s: time limit of the search, seconds. The result is then the incumbent with its
            proven gap; with 0 it is the rounded and filled solution of the relaxation. The arrays
            and the first plan (tens of milliseconds for 500 jobs of 1:512) are always computed.
        gap: relative gap at which to stop. 0 means optimal: no plan has a value higher by more than
            1e-9 of the difference between the bound and a simple plan, or by more than the rounding
            error of sums in double precision (1e-12 of the objective).
        dynamic_program: whether reduced problems on one pool of nodes may be solved by dynamic
            programming where that is quicker than HiGHS. Both are exact.

    Returns:
        A size for each job that gets nodes, in the order of ``bids``.

    Raises:
        BidError: if two bids name one job, or a capacity is not a count.
    """
    started = clock()

    def remaining_s() -> float:
        return started + time_limit_s - clock()

    check(bids, capacity)
    if not bids:
        return Allocation({}, 0.0, 0.0, 0.0, "optimal", clock() - started)
    drops = 0
    must_run_sizes: dict[str, Assignment[PoolT]] = {}
    if any(bid.must_run for bid in bids):
        drops, must_run_sizes = fewest_drops(bids, capacity, time_limit_s=0.5 * time_limit_s)
    options = table.build(bids, capacity, drops)
    jobs = [bid.job for bid in bids]
    feasible = (
        table.to_plan(options, jobs, must_run_sizes)
        if must_run_sizes or drops
        else table.idle_plan(options)
    )
    assert feasible is not None, "every must-run job has a size or may be dropped"
    dual = prices.minimise_dual(options)
    relaxed = prices.relaxed_plan(options, dual)
    if len(options.capacity) > 1:
        dual, lp_plan = relax(options, dual, feasible, remaining_s=remaining_s)
        relaxed = relaxed if lp_plan is None else lp_plan
    plan = search.first_plan(options, dual, relaxed, feasible)
    options, dual, plan = search.fix_by_reduced_cost(options, dual, plan)
    result = search.improve(
        options, dual, plan, remaining_s=remaining_s, gap=gap, dynamic_program=dynamic_program
    )
    sizes = prefer_earlier(bids, table.to_sizes(options, result.plan, bids))
    sizes = prefer_current(bids, capacity, sizes)
    objective, dropped = plan_value(sizes, bids)
    unproven = result.duality_gap - result.gap_bound
    bound = objective if unproven <= dual.noise else max(objective, dual.bound - result.gap_bound)
    return Allocation(
        sizes=sizes,
        objective=objective,
        bound=bound,
        gap=relative_gap(objective, bound),
        status="optimal" if unproven <= result.tolerance else "time_limit",
        solve_s=clock() - started,
        dropped=dropped,
        proof=result.proof,
        reduced_size=result.reduced_size,
    )
