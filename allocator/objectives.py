"""The inputs of a bid besides the scaling curve: the goal, the cost of a rescale, the sizes.

Decides what these inputs mean. It does not value sizes (:mod:`allocator.valuation`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from allocator.bids import BidError


class Goal(str, Enum):
    """Objective of the plan."""

    THROUGHPUT = "throughput"
    """Samples: a job that processes more of them per second has a higher value."""
    EFFICIENCY = "efficiency"
    """Single-node seconds: throughput divided by the job's own throughput on one node, so that
    light and heavy models count equally.
    """


class ExtrapolationPolicy(str, Enum):
    """Treatment of sizes beyond the last point of a curve."""

    CONSTANT = "hold"
    """Offer them at the throughput of the last point, with a note in the bid."""
    DROP = "drop"
    """Do not offer them, with a note in the bid."""
    ERROR = "error"
    """Refuse the bid."""


@dataclass(frozen=True)
class RescaleCost:
    """Pauses of a job, seconds, by kind of change. The defaults were measured on Summit (up
    17-19 s, down 11-13 s).

    Raises:
        BidError: if a pause is negative or not finite.
    """

    up_s: float = 18.0
    """Pause of growing, charged at the throughput before."""
    down_s: float = 12.0
    """Pause of shrinking, charged at the throughput before."""
    start_s: float = 18.0
    """Pause of a start, or of a move to another pool of nodes, charged at the throughput after."""
    join_s: float = 0.0
    """Time until the nodes that join a running job contribute, while the others continue. Charged
    at the throughput that they add.
    """

    def __post_init__(self) -> None:
        for name in ("up_s", "down_s", "start_s", "join_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise BidError(f"The rescale cost {name} is {value}; give seconds, 0 or more.")


SUMMIT_RESCALE_COST = RescaleCost()
"""The default costs."""


@lru_cache(maxsize=4096)
def powers_of_two(largest: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … up to ``largest``."""
    return tuple(1 << p for p in range(max(0, largest).bit_length()))


@lru_cache(maxsize=4096)
def multiples(of: int, largest: int) -> tuple[int, ...]:
    """Return ``of``, ``2·of``, … up to ``largest``."""
    if of < 1:
        raise BidError(f"Sizes cannot be multiples of {of}; give 1 or more.")
    return tuple(range(of, largest + 1, of))
