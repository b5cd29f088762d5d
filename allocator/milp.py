"""How many nodes of which class each job gets: the exact answer to the MILP of section 7 of the
design.

    maximise  sum over jobs j, options o of value(j,o) · y(j,o)
    subject to  each job takes one option (or none),  nodes of each class <= its capacity,  y binary

Decides sizes; which nodes follows in :mod:`allocator.placement`. The way there: bids as arrays
(:mod:`allocator.table`), prices that bound every plan (:mod:`allocator.prices`), a first plan, and
a search among the few options the bound leaves (:mod:`allocator.search`), in HiGHS or by a dynamic
program where that is quicker (:mod:`allocator.core`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from allocator import must_run, prices, relax, search, table, ties
from allocator.allocation import Allocation, relative_gap, worth
from allocator.bids import Bid, Seat, check

__all__ = ["Allocation", "MonotonicClock", "solve"]

MonotonicClock = Callable[[], float]
"""Seconds on a clock that never goes back, for example :func:`time.perf_counter`."""


def no_clock() -> float:
    """The clock of a caller that has none: it shows no time."""
    return 0.0


def solve(
    bids: Sequence[Bid],
    capacity: Mapping[str, int],
    *,
    clock: MonotonicClock = no_clock,
    time_limit_s: float = 2.0,
    gap: float = 0.0,
    counting: bool = True,
) -> Allocation:
    """The plan that maximises the sum of the bids' values within ``capacity``.

    Must-run jobs (idle value -inf) come first: as many of them as possible get nodes; among the
    plans that drop as few, the most valuable wins, a dropped job counting 0. Of plans worth the
    same, what runs stays as it is, and newcomers are served in the order of ``bids``.

    Args:
        bids: of all jobs, in the order in which they came.
        capacity: node class -> nodes.
        clock: tells the time. Without one the search goes on until the best plan is proven: only
            each single run of HiGHS ends after ``time_limit_s`` then, and ``solve_s`` is 0.
        time_limit_s: when to stop searching, seconds. The answer is then the best plan found, with
            the gap that was proven; with 0 it is the rounded and filled-up price solution. Making
            the arrays and the first plan (tens of milliseconds for 500 jobs of 1:512) is not
            interrupted.
        gap: relative gap that is good enough. 0 means optimal: no plan is worth more by a part in
            1e9 of what is at stake between the bound and a simple plan, or by the rounding of
            double precision sums (a part in 1e12 of the objective).
        counting: whether cores on one class of nodes may be decided by counting nodes where that is
            quicker than HiGHS. Both are exact; without it every core goes to HiGHS.

    Returns:
        A size for each job that gets nodes, in the order of ``bids``.

    Raises:
        BidError: when two bids name one job, or a capacity is no count.
    """
    began = clock()

    def left_s() -> float:
        return began + time_limit_s - clock()

    check(bids, capacity)
    if not bids:
        return Allocation({}, 0.0, 0.0, 0.0, "optimal", clock() - began)
    drops, seated = 0, dict[str, Seat]()
    if any(bid.must_run for bid in bids):
        drops, seated = must_run.seats(bids, capacity, time_limit_s=0.5 * time_limit_s)
    options = table.build(bids, capacity, drops)
    jobs = [bid.job for bid in bids]
    seats = table.rows_for(options, jobs, seated) if seated or drops else table.idle(options)
    assert seats is not None, "every must-run job has a seat or may be dropped"
    dual = prices.minimise(options)
    wish = prices.choices(options, dual)
    if len(options.capacity) > 1:
        dual, relaxed = relax.relax(options, dual, seats, left_s=left_s)
        wish = wish if relaxed is None else relaxed
    plan = search.first_plan(options, dual, wish, seats)
    options, dual, plan = search.narrow(options, dual, plan)
    found = search.improve(options, dual, plan, left_s=left_s, gap=gap, counting=counting)
    sizes = ties.in_order(bids, table.assign(options, found.plan, bids))
    sizes = ties.keep(bids, capacity, sizes)
    objective, dropped = worth(sizes, bids)
    proven = found.waste - found.floor <= found.accept
    bound = (
        objective
        if found.waste - found.floor <= dual.noise
        else max(objective, dual.bound - found.floor)
    )
    return Allocation(
        sizes=sizes,
        objective=objective,
        bound=bound,
        gap=relative_gap(objective, bound),
        status="optimal" if proven else "time_limit",
        solve_s=clock() - began,
        dropped=dropped,
        proof=found.proof,
        core=found.core,
    )
