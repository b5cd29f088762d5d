"""Exhaustive search: the best plan over several classes of nodes, by enumeration of all reachable
states. It is slow and simple on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from allocator import Bid


def best(bids: Sequence[Bid], capacity: Mapping[str, int]) -> tuple[int, float]:
    """(must-run jobs dropped, objective) of the best plan: fewest drops, then most value."""
    classes = list(capacity)
    states: dict[tuple[int, ...], tuple[int, float]] = {(0,) * len(classes): (0, 0.0)}
    for bid in bids:
        after: dict[tuple[int, ...], tuple[int, float]] = {}
        for used, (drops, value) in states.items():
            must = bid.idle_value == -math.inf
            moves = [(used, (drops + must, value + (0.0 if must else bid.idle_value)))]
            for c, name in enumerate(classes):
                for size, worth in zip(*_pairs(bid, name), strict=True):
                    if used[c] + size <= capacity[name]:
                        moves.append(
                            ((*used[:c], used[c] + size, *used[c + 1 :]), (drops, value + worth))
                        )
            for state, reached in moves:
                incumbent = after.get(state)
                if incumbent is None or (reached[0], -reached[1]) < (
                    incumbent[0],
                    -incumbent[1],
                ):
                    after[state] = reached
        states = after
    drops, negative = min((drops, -value) for drops, value in states.values())
    return drops, -negative


def _pairs(bid: Bid, name: str) -> tuple[list[int], list[float]]:
    options = bid.options.get(name)
    return ([], []) if options is None else (options.sizes.tolist(), options.values.tolist())


def check_feasible(
    sizes: Mapping[str, tuple[str, int]], bids: Sequence[Bid], capacity: Mapping[str, int]
) -> None:
    """Every job has an offered size, at most one, and no class is overfull."""
    used = dict.fromkeys(capacity, 0)
    offers = {bid.job: bid for bid in bids}
    for job, (name, size) in sizes.items():
        assert size >= 1
        assert offers[job].value((name, size)) is not None
        used[name] += size
    assert all(used[name] <= capacity[name] for name in capacity)
