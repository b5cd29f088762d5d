"""Tells MalleTrain what nodes are worth to the cache, from what is asked of it (``--worth``).

The proxy of the first slot asks all proxies what so much memory would serve
(:mod:`infinicache.demand`) and says it for the whole service, when it has changed enough to matter.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Mapping

from infinicache.connection import CallFailed, ConnectionLost
from infinicache.demand import worth
from infinicache.node import CacheNode
from malletrain import membership

EVERY_S = 30.0
OBSERVED_S = 300.0
"""Nothing is said before so much was seen: a cache that has just begun has no hits."""
CHANGE = 0.1
"""What is said anew: a change by this share of the largest value."""
LEAST = 1e-3
"""Samples/s of memory that serves nothing: nodes that nobody else wants are kept, to see whether
that changes.
"""
log = logging.getLogger("infinicache")


async def keep_telling(
    node: CacheNode,
    group: membership.Membership,
    per_gb: float,
    *,
    every_s: float = EVERY_S,
    observed_s: float = OBSERVED_S,
) -> None:
    """Until it is cancelled. ``per_gb``: samples that a gigabyte served from memory is worth."""
    previous: dict[int, float] = {}
    while True:
        await asyncio.sleep(every_s)
        if node.proxies()[:1] != [node.address]:
            previous = {}  # another one speaks
            continue
        try:
            curves = await node.demand(observed_s)
        except (ConnectionLost, CallFailed) as error:
            log.info("the demand is not known: %s", error)
            continue
        if not curves:
            continue
        values = worth(curves, per_gb, node.for_objects)
        values = {size: max(LEAST, value) for size, value in values.items()}
        if differs(previous, values):
            group.set_values(values)
            previous = values
            print(f"nodes are worth {values}", flush=True)


def differs(old: Mapping[int, float], new: Mapping[int, float]) -> bool:
    """Whether it is worth saying anew."""
    if not old:
        return True
    largest = max(*old.values(), *new.values(), LEAST)
    return any(abs(at(new, k) - at(old, k)) > CHANGE * largest for k in {*old, *new})


def at(values: Mapping[int, float], size: int) -> float:
    """The value of a size, as a plan reads it: linear between sizes, level beyond the last."""
    sizes = sorted(values)
    i = bisect_left(sizes, size)
    if i == len(sizes):
        return values[sizes[-1]]
    low, low_value = (sizes[i - 1], values[sizes[i - 1]]) if i else (0, 0.0)
    high = sizes[i]
    return low_value + (values[high] - low_value) * (size - low) / (high - low)
