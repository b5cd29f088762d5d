"""The exact solution of the allocation MILP (section 7 of the design), a multiple-choice knapsack
problem with one capacity for each class of nodes.

    maximise  sum over jobs j, options o of value(j,o) · y(j,o)
    subject to  each job takes one option (or none),  nodes of each class <= its capacity,  y binary

Decides how many nodes of which class each job gets. It does not choose the nodes
(:mod:`allocator.placement`). The steps: bids become arrays (:mod:`allocator.table`), prices bound
every plan (:mod:`allocator.prices`, :mod:`allocator.relax`), greedy moves make a first plan
(:mod:`allocator.moves`), and a search solves the few options that the bound leaves open
(:mod:`allocator.search`), in HiGHS or with a dynamic program (:mod:`allocator.reduced_problem`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from allocator import must_run, prices, relax, search, table, tie_breaking
from allocator.allocation import Allocation, plan_value, relative_gap
from allocator.bids import Assignment, Bid, check

__all__ = ["Allocation", "MonotonicClock", "solve"]

MonotonicClock = Callable[[], float]
"""Seconds on a clock that never goes back, for example :func:`time.perf_counter`."""


def no_clock() -> float:
    """Return 0: a clock that stands still, for callers without one."""
    return 0.0


def solve(
    bids: Sequence[Bid],
    capacity: Mapping[str, int],
    *,
    clock: MonotonicClock = no_clock,
    time_limit_s: float = 2.0,
    gap: float = 0.0,
    dynamic_program: bool = True,
) -> Allocation:
    """Return the plan that maximises the sum of the bids' values within ``capacity``.

    Must-run jobs (idle value -inf) come first: the plan drops as few of them as possible. Among the
    plans that drop as few, the one with the highest value wins; a dropped job counts 0. Among plans
    of equal value, running jobs keep their nodes and waiting jobs are served in the order of
    ``bids``.

    Args:
        bids: of all jobs, in the order of arrival.
        capacity: node class -> nodes.
        clock: tells the time, seconds. Without one the search ends only when the plan is proven
            optimal: ``time_limit_s`` then limits single runs of HiGHS, and ``solve_s`` is 0.
        time_limit_s: time limit of the search, seconds. The result is then the incumbent with its
            proven gap; with 0 it is the rounded and filled solution of the relaxation. The arrays
            and the first plan (tens of milliseconds for 500 jobs of 1:512) are always computed.
        gap: relative gap at which to stop. 0 means optimal: no plan has a value higher by more than
            1e-9 of the difference between the bound and a simple plan, or by more than the rounding
            error of sums in double precision (1e-12 of the objective).
        dynamic_program: whether reduced problems on one class of nodes may be solved by dynamic
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
    drops, must_run_sizes = 0, dict[str, Assignment]()
    if any(bid.must_run for bid in bids):
        drops, must_run_sizes = must_run.fewest_drops(
            bids, capacity, time_limit_s=0.5 * time_limit_s
        )
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
        dual, lp_plan = relax.relax(options, dual, feasible, remaining_s=remaining_s)
        relaxed = relaxed if lp_plan is None else lp_plan
    plan = search.first_plan(options, dual, relaxed, feasible)
    options, dual, plan = search.fix_by_reduced_cost(options, dual, plan)
    result = search.improve(
        options, dual, plan, remaining_s=remaining_s, gap=gap, dynamic_program=dynamic_program
    )
    sizes = tie_breaking.prefer_earlier(bids, table.to_sizes(options, result.plan, bids))
    sizes = tie_breaking.prefer_current(bids, capacity, sizes)
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
