"""The exact dynamic program over node counts, for one class of nodes.

It is the reference for the tests of the solver and not part of the product.
Time O(options x nodes), memory O(jobs x nodes).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from allocator.bids import Allocation, Bid, BidError, check, plan_value


def solve(bids: Sequence[Bid], capacity: Mapping[str, int]) -> Allocation:
    """The best plan for bids on one class of nodes.

    Must-run jobs that do not fit are dropped, as few as possible; among plans that drop equally
    few, the most valuable wins: dropping one costs more than all other values together can differ
    by.

    Raises:
        BidError: when ``capacity`` names more than one class with nodes.
    """
    check(bids, capacity)
    classes = [name for name, nodes in capacity.items() if nodes > 0]
    if len(classes) > 1:
        raise BidError(
            f"The dynamic program handles one class of nodes, not {len(classes)}; use "
            "allocator.milp."
        )
    name = classes[0] if classes else ""
    nodes = int(capacity[name]) if classes else 0
    offers = [[(int(k), float(v)) for k, v in _pairs(bid, name) if k <= nodes] for bid in bids]
    penalty = 2.0 * sum(_reach(bid, offer) for bid, offer in zip(bids, offers, strict=True)) or 1.0
    idle = [-penalty if bid.must_run else bid.idle_value for bid in bids]
    # best[j][d]: the most value of the first j jobs with d nodes.
    best = np.zeros((len(bids) + 1, nodes + 1))
    for j, offer in enumerate(offers):
        np.add(best[j], idle[j], out=best[j + 1])
        for size, value in offer:
            np.maximum(
                best[j + 1, size:], best[j, : nodes + 1 - size] + value, out=best[j + 1, size:]
            )
    sizes: dict[str, tuple[str, int]] = {}
    free = nodes
    for j in range(len(bids) - 1, -1, -1):
        reached = best[j + 1, free]
        if best[j, free] + idle[j] == reached:
            continue
        size = next(
            k for k, value in offers[j] if k <= free and best[j, free - k] + value == reached
        )
        sizes[bids[j].job] = (name, size)
        free -= size
    objective, dropped = plan_value(sizes, bids)
    return Allocation(sizes, objective, objective, 0.0, "optimal", dropped=dropped)


def _pairs(bid: Bid, name: str) -> list[tuple[int, float]]:
    options = bid.options.get(name)
    return (
        []
        if options is None
        else list(zip(options.sizes.tolist(), options.values.tolist(), strict=True))
    )


def _reach(bid: Bid, offer: list[tuple[int, float]]) -> float:
    """How much the job's own value can differ between two plans."""
    worths = [value for _, value in offer] + [
        0.0 if bid.idle_value == -math.inf else bid.idle_value
    ]
    return max(worths) - min(worths)
