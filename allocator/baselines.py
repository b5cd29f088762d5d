"""The plain policies that MalleTrain is measured against: equal share and first come, first served.

Decides sizes without looking at what they are worth, from the same bids and with the same answer as
the MILP.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from allocator.allocation import Allocation, relative_gap, worth
from allocator.bids import Bid, Seat, check


def equal_share(bids: Sequence[Bid], capacity: Mapping[str, int]) -> Allocation:
    """As equal sizes as the jobs' limits allow, ignoring curves.

    Jobs are admitted in order while their smallest sizes fit, each on the class with most nodes a
    job so far. Then sizes grow, one step at a time, always that of the job with the fewest nodes
    (the earlier one of equals).
    """
    check(bids, capacity)
    sizes: dict[str, Seat] = {}
    left = {name: int(nodes) for name, nodes in capacity.items()}
    ladder: dict[str, tuple[int, ...]] = {}
    crowd = dict.fromkeys(left, 0)
    for bid in bids:
        homes = [
            name
            for name, options in bid.options.items()
            if name in left and len(options.sizes) and options.sizes[0] <= left[name]
        ]
        if homes:
            home = max(homes, key=lambda name: capacity[name] / (crowd[name] + 1))
            steps = tuple(bid.options[home].sizes.tolist())
            ladder[bid.job] = steps
            sizes[bid.job] = (home, steps[0])
            left[home] -= steps[0]
            crowd[home] += 1
    rung = dict.fromkeys(sizes, 0)
    heap = [(sizes[job][1], order, job) for order, job in enumerate(sizes)]
    heapq.heapify(heap)
    while heap:
        size, order, job = heapq.heappop(heap)
        home, at = sizes[job][0], rung[job] + 1
        if at < len(ladder[job]) and ladder[job][at] - size <= left[home]:
            left[home] -= ladder[job][at] - size
            rung[job] = at
            sizes[job] = (home, ladder[job][at])
            heapq.heappush(heap, (ladder[job][at], order, job))
    return _answer(sizes, bids)


def fcfs(bids: Sequence[Bid], capacity: Mapping[str, int]) -> Allocation:
    """First come, first served: each job in turn gets its largest size that still fits, on the
    class where that is largest.
    """
    check(bids, capacity)
    sizes: dict[str, Seat] = {}
    left = {name: int(nodes) for name, nodes in capacity.items()}
    for bid in bids:
        best = ("", 0)
        for name, options in bid.options.items():
            fitting = int(np.searchsorted(options.sizes, left.get(name, 0), side="right"))
            if fitting and options.sizes[fitting - 1] > best[1]:
                best = (name, int(options.sizes[fitting - 1]))
        if best[1]:
            sizes[bid.job] = best
            left[best[0]] -= best[1]
    return _answer(sizes, bids)


def _answer(sizes: dict[str, Seat], bids: Sequence[Bid]) -> Allocation:
    objective, dropped = worth(sizes, bids)
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
