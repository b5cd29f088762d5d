"""The exact dynamic program over node counts, for one class of nodes.

Decides nothing for the product: it is the oracle the MILP is checked against, so it is kept plain. Time O(options x nodes), memory
O(jobs x nodes).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from allocator.allocation import Allocation, worth
from allocator.bids import Bid, BidError, check


def solve(bids: Sequence[Bid], capacity: Mapping[str, int]) -> Allocation:
    """The best plan for bids on one class of nodes.

    Must-run jobs that do not fit are dropped, as few as possible; among plans that drop equally few, the most valuable wins.

    Raises:
        BidError: when ``capacity`` names more than one class with nodes.
    """
    began = time.perf_counter()
    check(bids, capacity)
    classes = [name for name, nodes in capacity.items() if nodes > 0]
    if len(classes) > 1:
        raise BidError(f"The dynamic program handles one class of nodes, not {len(classes)}; use allocator.milp.")
    name = classes[0] if classes else ""
    # best[d] holds (fewest drops, most value) with d nodes given out; drops and values are compared lexicographically.
    nodes = int(capacity[name]) if classes else 0
    drops = np.full(nodes + 1, np.inf)
    value = np.full(nodes + 1, -np.inf)
    drops[0], value[0] = 0, 0.0
    choices = np.zeros((len(bids), nodes + 1), dtype=np.int64)
    for j, bid in enumerate(bids):
        new_drops, new_value = drops + bid.must_run, value + (0.0 if bid.must_run else bid.idle_value)
        options = bid.options.get(name)
        pairs = zip(options.sizes.tolist(), options.values.tolist(), strict=True) if options is not None else ()
        for size, worth_of in pairs:
            if size > nodes:
                break
            to_drops, to_value = drops[: nodes + 1 - size], value[: nodes + 1 - size] + worth_of
            better = (to_drops < new_drops[size:]) | ((to_drops == new_drops[size:]) & (to_value > new_value[size:]))
            new_drops[size:][better] = to_drops[better]
            new_value[size:][better] = to_value[better]
            choices[j, size:][better] = size
        drops, value = new_drops, new_value
    fewest = drops.min()
    left = int(np.argmax(np.where(drops == fewest, value, -np.inf)))
    sizes: dict[str, tuple[str, int]] = {}
    for j in range(len(bids) - 1, -1, -1):
        size = int(choices[j, left])
        if size:
            sizes[bids[j].job] = (name, size)
            left -= size
    objective, dropped = worth(sizes, bids)
    assert not math.isnan(objective)
    return Allocation(sizes, objective, objective, 0.0, "optimal", time.perf_counter() - began, dropped)
