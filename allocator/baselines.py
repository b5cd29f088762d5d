"""The simple policies that MalleTrain is compared with: equal share, and first come, first served.

Decides sizes from the same bids as the MILP, ignores their values, and returns an Allocation like
the MILP. It does not choose nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from allocator.bids import Allocation, Assignment, Bid, PoolT, check, plan_value, relative_gap


def equal_share(bids: Sequence[Bid[PoolT]], capacity: Mapping[PoolT, int]) -> Allocation[PoolT]:
    """Return sizes as equal as the jobs' limits allow; curves are ignored.

    Jobs are admitted in order while their smallest sizes fit, each in the pool with the most nodes
    per job so far. Then sizes grow one step at a time: the job with the fewest nodes grows first,
    the earlier one of equals.

    Args:
        bids: the bids of all jobs, in the order of arrival.
        capacity: pool -> nodes.

    Raises:
        BidError: if two bids name one job, or a capacity is not a count.
    """
    check(bids, capacity)
    sizes: dict[str, Assignment[PoolT]] = {}
    free = {pool: int(nodes) for pool, nodes in capacity.items()}
    sizes_of: dict[str, tuple[int, ...]] = {}
    jobs_in = dict.fromkeys(free, 0)
    for bid in bids:
        pools = [
            pool
            for pool, options in bid.options.items()
            if pool in free and len(options.sizes) and options.sizes[0] <= free[pool]
        ]
        if pools:
            pool = max(pools, key=lambda pool: capacity[pool] / (jobs_in[pool] + 1))
            offered = tuple(bid.options[pool].sizes.tolist())
            sizes_of[bid.job] = offered
            sizes[bid.job] = (pool, offered[0])
            free[pool] -= offered[0]
            jobs_in[pool] += 1
    index_of = dict.fromkeys(sizes, 0)
    heap = [(sizes[job][1], order, job) for order, job in enumerate(sizes)]
    heapq.heapify(heap)
    while heap:
        size, order, job = heapq.heappop(heap)
        pool, index = sizes[job][0], index_of[job] + 1
        offered = sizes_of[job]
        if index < len(offered) and offered[index] - size <= free[pool]:
            free[pool] -= offered[index] - size
            index_of[job] = index
            sizes[job] = (pool, offered[index])
            heapq.heappush(heap, (offered[index], order, job))
    return _allocation(sizes, bids)


def fcfs(bids: Sequence[Bid[PoolT]], capacity: Mapping[PoolT, int]) -> Allocation[PoolT]:
    """Return sizes by first come, first served: each job in turn gets the largest size that still
    fits, in the pool where that size is largest. A job of which no size fits is skipped: the jobs
    after it do not wait for it.

    Args:
        bids: the bids of all jobs, in the order of arrival.
        capacity: pool -> nodes.

    Raises:
        BidError: if two bids name one job, or a capacity is not a count.
    """
    check(bids, capacity)
    sizes: dict[str, Assignment[PoolT]] = {}
    free = {pool: int(nodes) for pool, nodes in capacity.items()}
    for bid in bids:
        best: Assignment[PoolT] | None = None
        for pool, options in bid.options.items():
            fitting = int(np.searchsorted(options.sizes, free.get(pool, 0), side="right"))
            if fitting and (best is None or options.sizes[fitting - 1] > best[1]):
                best = (pool, int(options.sizes[fitting - 1]))
        if best is not None:
            sizes[bid.job] = best
            free[best[0]] -= best[1]
    return _allocation(sizes, bids)


def _allocation(
    sizes: dict[str, Assignment[PoolT]], bids: Sequence[Bid[PoolT]]
) -> Allocation[PoolT]:
    objective, dropped = plan_value(sizes, bids)
    bound = sum(
        max(
            [
                bid.idle_value,
                *(float(o.values.max()) for o in bid.options.values() if len(o.values)),
            ]
        )
        for bid in bids
    )
    bound = max(objective, bound)
    gap = relative_gap(objective, bound)
    return Allocation(sizes, objective, bound, gap, "heuristic", dropped=dropped)
