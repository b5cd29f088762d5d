"""How many nodes of one pool each trainer gets, by parts and by what its jobs could use. Pure.

Decides numbers only. Which jobs are reckoned with the pool is :mod:`malletrain.core.homes`', which
nodes they are :mod:`malletrain.core.apart`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from allocator import NodeInfo
from malletrain.core.planning import Candidate


@dataclass
class Wish:
    """What one trainer's jobs could do with a pool."""

    part: float
    stays: int = 0
    """Nodes of jobs that stay as they are."""
    due: int = 0
    """Nodes for minimums that are guaranteed."""
    most: int = 0
    """More they could not use."""
    held: list[str] = field(default_factory=list)
    """The nodes of the pool that they have, those of jobs that stay first."""

    def add(self, candidate: Candidate, held: Sequence[str]) -> None:
        """One job more. ``held``: the nodes of the pool that it has."""
        if candidate.fixed:
            self.held[self.stays : self.stays] = held
            self.stays += len(held)
            self.most += len(held)
        else:
            self.held += held
            self.due += (candidate.smallest or 0) if candidate.must_run else 0
            self.most += candidate.max_nodes


def part_of(group: Sequence[Candidate]) -> float:
    """In what proportion the trainer of these jobs has nodes that others may use, too."""
    return group[0].trainer.part if group and group[0].trainer else 1.0


def wish_of(group: Sequence[Candidate], pool: str, nodes: Mapping[str, NodeInfo]) -> Wish:
    """``group``: the jobs of one trainer that are at home in the pool."""
    wish = Wish(part_of(group))
    for c in group:
        wish.add(c, [n for n in c.nodes if n in nodes and nodes[n].node_class == pool])
    return wish


def shares_of(wishes: Mapping[str, Wish], nodes: int) -> dict[str, int]:
    """How many of ``nodes`` each gets."""
    least, room = {}, nodes - sum(wish.stays for wish in wishes.values())
    for name, wish in wishes.items():
        extra = min(wish.due, room)
        least[name], room = wish.stays + extra, room - extra
    level = _level(wishes, least, nodes)
    counts = {
        name: max(least[name], min(wish.most, math.floor(wish.part * level + 1e-9)))
        for name, wish in wishes.items()
    }
    left = nodes - sum(counts.values())

    def next_to(name: str) -> tuple[bool, float, str]:
        # Who has more nodes already comes first, so that a node does not go to and fro.
        wish = wishes[name]
        return counts[name] >= len(wish.held), (counts[name] + 1) / wish.part, name

    for name in sorted(wishes, key=next_to):
        if left > 0 and counts[name] < wishes[name].most:
            counts[name] += 1
            left -= 1
    return counts


def _level(wishes: Mapping[str, Wish], least: Mapping[str, int], nodes: int) -> float:
    """Nodes for each unit of part, so that together they have ``nodes``, or all that they want."""
    spans = [(least[n] / w.part, w.most / w.part, w.part) for n, w in wishes.items()]
    below, used = 0.0, float(sum(least.values()))
    for end in sorted({end for low, high, _ in spans for end in (low, high)} - {0.0}):
        rising = sum(part for low, high, part in spans if low <= below < high)
        if used + rising * (end - below) >= nodes:
            return below + max(0.0, nodes - used) / rising if rising else below
        used += rising * (end - below)
        below = end
    return below
