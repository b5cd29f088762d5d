"""Which nodes an object's chunks go to: those that will last, and that do not leave together. Pure.

What is known of a node is its prospect: how long it is expected to stay, and what it has in common
with others (its rack, the moment at which it came). On a batch-scheduled machine nodes that have
much in common go at once, when one large job starts. Chunks are put where nodes last longest, and
among equals where the worst such departure takes as few of them as possible.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Prospect:
    """What is expected of a node."""

    lasts_s: float = math.inf
    """Seconds that it stays yet."""
    bonds: tuple[str, ...] = ()
    """What ties it to others: nodes with one in common are taken to leave together."""


NO_PROSPECT = Prospect()


def choose(
    room: Sequence[str],
    count: int,
    prospects: Mapping[str, Prospect],
    fullness: Mapping[str, float],
    rng: random.Random,
    there: Iterable[str] = (),
) -> list[str]:
    """``count`` of the nodes in ``room`` (fewer where there are fewer), the best first.

    Args:
        prospects: of the nodes; one that is missing has none.
        fullness: share of each node's memory that is taken; among equals the emptiest wins.
        there: nodes that have chunks of the object already.
    """
    bound = Counter(bond for node in there for bond in prospects.get(node, NO_PROSPECT).bonds)
    candidates = list(room)
    rng.shuffle(candidates)
    candidates.sort(key=lambda a: fullness.get(a, 0.0))
    lasting = {a: _lasting(prospects.get(a, NO_PROSPECT).lasts_s) for a in candidates}
    chosen: list[str] = []
    while candidates and len(chosen) < count:
        best = min(
            candidates,
            key=lambda a: (
                -lasting[a],
                max((bound[b] for b in prospects.get(a, NO_PROSPECT).bonds), default=0),
            ),
        )
        candidates.remove(best)
        chosen.append(best)
        bound.update(prospects.get(best, NO_PROSPECT).bonds)
    return chosen


def _lasting(seconds: float) -> float:
    """Lives are told apart by factors of two: nearer than that no forecast is."""
    return math.inf if math.isinf(seconds) else math.floor(math.log2(max(1.0, seconds)))


def bonds_of(node: str, came: str) -> tuple[str, ...]:
    """What ties a node to others: its rack, as its name tells it (the name without its last
    number), and the moment ``came`` at which it came.
    """
    return (f"rack {node.rstrip('0123456789')}", f"came {came}")
