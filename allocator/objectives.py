"""What a bid is made from beside a scaling curve: what is maximised, what a rescale costs, which
sizes there are.

Decides what these are. What a size is worth follows in :mod:`allocator.valuation`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from allocator.bids import BidError


class Goal(str, Enum):
    """What is maximised."""

    THROUGHPUT = "throughput"
    """Samples: a job that processes more of them per second is worth more."""
    EFFICIENCY = "efficiency"
    """Single-node seconds: throughput over the job's own throughput on one node, so that light and
    heavy models count alike.
    """


class Beyond(str, Enum):
    """What to do with sizes beyond the last point of a curve."""

    HOLD = "hold"
    """Offer them at the last known throughput, with a note in the bid."""
    DROP = "drop"
    """Do not offer them, with a note in the bid."""
    ERROR = "error"
    """Refuse the bid."""


@dataclass(frozen=True)
class RescaleCost:
    """Seconds in which a job processes nothing, by kind of change. The defaults are what Summit
    showed (up 17-19 s, down 11-13 s).
    """

    up_s: float = 18.0
    """Growing, charged at the throughput before."""
    down_s: float = 12.0
    """Shrinking, charged at the throughput before."""
    start_s: float = 18.0
    """Starting from nothing, or on another class of nodes, charged at the throughput after."""

    def __post_init__(self) -> None:
        for name in ("up_s", "down_s", "start_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise BidError(f"The rescale cost {name} is {value}; give seconds, 0 or more.")


SUMMIT = RescaleCost()
"""The default costs."""


@lru_cache(maxsize=4096)
def powers_of_two(largest: int) -> tuple[int, ...]:
    """1, 2, 4, … up to ``largest``."""
    return tuple(1 << p for p in range(max(0, largest).bit_length()))


@lru_cache(maxsize=4096)
def multiples(of: int, largest: int) -> tuple[int, ...]:
    """``of``, ``2·of``, … up to ``largest``."""
    if of < 1:
        raise BidError(f"Sizes cannot be multiples of {of}; give 1 or more.")
    return tuple(range(of, largest + 1, of))
