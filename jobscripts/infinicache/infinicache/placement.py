"""Decides which nodes get the chunks of an object: those that are expected to stay, and that do not
leave together. Pure: times are the caller's.

The prospect of a node is how long it is expected to stay, and the groups of nodes with which it may
leave (its rack, the time at which it joined). On a batch-scheduled machine such groups leave at
once when a large job starts. The nodes that stay longest are chosen; among equals, those of which
the worst such departure takes the fewest chunks.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Prospect:
    """The expectation for a node."""

    lasts_s: float = math.inf
    """Time that it is expected to stay, seconds."""
    departure_groups: tuple[str, ...] = ()
    """Names of groups of nodes that are expected to leave together."""


NO_PROSPECT = Prospect()


def choose(
    room: Sequence[str],
    count: int,
    prospects: Mapping[str, Prospect],
    fullness: Mapping[str, float],
    rng: random.Random,
    present_nodes: Iterable[str] = (),
) -> list[str]:
    """Return ``count`` of the nodes in ``room``, or all if there are fewer, the best first.

    Args:
        room: addresses of nodes with room for a chunk.
        count: number of nodes to choose.
        prospects: address → prospect; a missing node has none.
        fullness: address → used share of its memory. Among equals the emptiest node is chosen.
        rng: decides between equal nodes.
        present_nodes: addresses of nodes that already have chunks of the object.
    """
    chunks_in_group = Counter(
        group
        for node in present_nodes
        for group in prospects.get(node, NO_PROSPECT).departure_groups
    )
    candidates = list(room)
    rng.shuffle(candidates)
    candidates.sort(key=lambda a: fullness.get(a, 0.0))
    life_classes = {a: _life_class(prospects.get(a, NO_PROSPECT).lasts_s) for a in candidates}
    chosen: list[str] = []
    while candidates and len(chosen) < count:
        best = min(
            candidates,
            key=lambda a: (
                -life_classes[a],
                max(
                    (chunks_in_group[b] for b in prospects.get(a, NO_PROSPECT).departure_groups),
                    default=0,
                ),
            ),
        )
        candidates.remove(best)
        chosen.append(best)
        chunks_in_group.update(prospects.get(best, NO_PROSPECT).departure_groups)
    return chosen


def _life_class(seconds: float) -> float:
    """Return the class of a remaining time, a power of two: forecasts are no more precise."""
    return math.inf if math.isinf(seconds) else math.floor(math.log2(max(1.0, seconds)))


def departure_groups_of(node: str, joined_at: str) -> tuple[str, ...]:
    """Return the groups with which a node may leave: its rack, which is its name without the last
    number, and the nodes that joined at the same time ``joined_at``.
    """
    return (f"rack {node.rstrip('0123456789')}", f"joined {joined_at}")


JOIN_INTERVAL_S = 30.0
"""Nodes that join within one interval of this length count as joined together, seconds."""


@dataclass(frozen=True)
class _Arrival:
    name: str
    at: float


class NodeArrivals:
    """The arrivals of a proxy's nodes, and the prospect of each node that follows from them. Times
    are the caller's, in seconds.

    The prospect is the daemon's forecast of how long a node stays. Without a forecast it is the
    node's age: on every machine examined, gaps that have lasted long last longer, and the age was
    nearly as informative as the true end (docs/infinicache.md).
    """

    def __init__(self) -> None:
        self._came: dict[str, _Arrival] = {}
        self._lasts: dict[str, tuple[float, float]] = {}

    def add(self, address: str, name: str, age_s: float, now: float) -> None:
        """Record that a process registers, which has run for ``age_s`` on the node called
        ``name``.
        """
        self._came.setdefault(address, _Arrival(name, now - age_s))

    def update_lifetimes(self, lasts: Mapping[str, float], now: float) -> None:
        """Set the forecasts: address → seconds from ``now`` for which its node is expected to
        stay.
        """
        self._lasts = {address: (lasts_s, now) for address, lasts_s in lasts.items()}

    def remove(self, address: str) -> None:
        """Forget a node that has left."""
        self._came.pop(address, None)

    def prospect(self, address: str, now: float) -> Prospect:
        """Return the prospect of a node."""
        arrival = self._came.get(address)
        if arrival is None:
            return NO_PROSPECT
        lasts_s, reported_at = self._lasts.get(address, (now - arrival.at, now))
        return Prospect(
            max(0.0, lasts_s - (now - reported_at)),
            departure_groups_of(arrival.name, f"{arrival.at // JOIN_INTERVAL_S:.0f}"),
        )
