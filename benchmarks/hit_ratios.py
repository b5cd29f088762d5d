"""The hit ratios that caches can reach when each sample is read once in each epoch. Pure.

In such an epoch every sample is equally likely to be the next, so the hit ratio of no policy can
exceed the cached fraction *c* of the data. A cache that never evicts reaches it. An LRU cache does
not: it still has a sample at its next use only if the other samples that were used in between are
fewer than its capacity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def never_evict_hits(fraction: float) -> float:
    """Return the hit ratio of a cache that keeps each sample from its first read while it has room.

    Args:
        fraction: part of the data that fits, from 0; more than 1 if there is room for more.
    """
    return min(1.0, max(0.0, fraction))


def lru_hits(fraction: float) -> float:
    """Return the share of hits of an LRU cache over epochs that are independent permutations:
    c + (1 − c) · ln(1 − c).

    A sample at the relative place x of an epoch was last used at a place y of the epoch before.
    Since then the part (1 − y) + x − (1 − y) · x of all samples was used. The sample is a hit if
    that part is smaller than c. The formula is the integral over x and y, each uniform in (0, 1).

    Args:
        fraction: part of the data that fits, from 0.
    """
    if fraction >= 1.0:
        return 1.0
    if fraction <= 0.0:
        return 0.0
    return fraction + (1.0 - fraction) * math.log1p(-fraction)


def pooled_hits(memories: Iterable[float], data: float) -> float:
    """Return the hit ratio of the nodes of a job together, from the second epoch on.

    Args:
        memories: memory of each node for the data, bytes.
        data: size of the packed data set, bytes.
    """
    return never_evict_hits(sum(memories) / data) if data > 0 else 0.0
