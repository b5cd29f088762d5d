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

import time
from collections.abc import Mapping, Sequence

import numpy as np

from allocator import must_run, prices, relax, search, table
from allocator.allocation import Allocation, relative_gap, worth
from allocator.bids import Bid, check

__all__ = ["Allocation", "solve"]


def solve(
    bids: Sequence[Bid],
    capacity: Mapping[str, int],
    *,
    time_limit_s: float = 2.0,
    gap: float = 0.0,
    warm: Allocation | None = None,
    counting: bool = True,
) -> Allocation:
    """The plan that maximises the sum of the bids' values within ``capacity`` (node class ->
    nodes).

    Must-run jobs (idle value -inf) come first: as many of them as possible get nodes; among the
    plans that drop as few, the most valuable wins, a dropped job counting 0.

    Args:
        time_limit_s: when to stop searching, seconds. The answer is then the best plan found, with
            the gap that was proven; with 0 it is the rounded and filled-up price solution. Making
            the arrays and the first plan (tens of milliseconds for 500 jobs of 1:512) is not
            interrupted.
        gap: relative gap that is good enough. 0 means optimal: no plan is worth more by a part in
            1e9 of what is at stake between the bound and a simple plan, or by the rounding of
            double precision sums (a part in 1e12 of the objective).
        warm: an earlier plan. Where it is still as good as any, it is kept, so that nothing is
            moved for nothing; otherwise it is where the search begins.
        counting: whether cores on one class of nodes may be decided by counting nodes where that is
            quicker than HiGHS. Both are exact; without it every core goes to HiGHS.

    Raises:
        BidError: when two bids name one job, or a capacity is no count.
    """
    began = time.perf_counter()
    deadline = began + time_limit_s
    check(bids, capacity)
    if not bids:
        return Allocation({}, 0.0, 0.0, 0.0, "optimal", time.perf_counter() - began)
    jobs = [bid.job for bid in bids]
    drops, seated = 0, dict[str, tuple[str, int]]()
    if any(bid.must_run for bid in bids):
        drops, seated = must_run.seats(bids, capacity, time_limit_s=0.5 * time_limit_s)
    options = table.build(bids, capacity, drops)
    guess = None
    if warm is not None and warm.prices and drops == 0:
        guess = np.array([warm.prices.get(name, 0.0) for name in options.classes])
    seats = table.rows_for(options, jobs, seated) if seated or drops else table.idle(options)
    assert seats is not None, "every must-run job has a seat or may be dropped"
    dual = prices.minimise(options, guess)
    wish = prices.choices(options, dual)
    if len(options.capacity) > 1:
        dual, relaxed = relax.relax(options, dual, seats, deadline=deadline)
        wish = wish if relaxed is None else relaxed
    plan = search.first_plan(options, dual, wish, seats)
    if warm is not None:
        before = table.rows_for(options, jobs, warm.sizes)
        if (
            before is not None
            and options.fits(before)
            and dual.waste(options, before) <= dual.waste(options, plan) + dual.noise
        ):
            plan = before
    options, dual, plan = search.narrow(options, dual, plan)
    found = search.improve(options, dual, plan, deadline=deadline, gap=gap, counting=counting)
    sizes = table.assign(options, found.plan, jobs, warm.sizes if warm is not None else {})
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
        solve_s=time.perf_counter() - began,
        dropped=dropped,
        prices={name: float(p) for name, p in zip(options.classes, dual.prices, strict=False)},
        proof=found.proof,
        core=found.core,
    )
