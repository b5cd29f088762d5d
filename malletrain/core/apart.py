"""One plan for each trainer. Pure.

Decides which nodes each plan is made of. A node that one trainer's jobs may use is in that
trainer's plan. Those that several may use are divided first, pool by pool: in the proportion of
their parts, none gets more than its jobs could use, and what one leaves the others have. A job that
may not be moved keeps its nodes, and a minimum that is guaranteed has room. Then each plan is made
by itself. What the plans achieve is in different units and is never added up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from allocator import NodeInfo
from malletrain.core.planning import Candidate, Plan, Planner
from malletrain.core.settings import PlanningSettings

_HALVINGS = 64


@dataclass
class _Wish:
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


class ApartPlanner:
    """Makes each trainer's plan with ``planner``, and one plan of them all."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def __call__(
        self,
        candidates: Sequence[Candidate],
        nodes: Mapping[str, NodeInfo],
        settings: PlanningSettings,
        favoured: Collection[str] = (),
        /,
    ) -> Plan:
        """As :func:`malletrain.core.planning.make_plan`; the objective of several plans is no
        number.
        """
        groups: dict[str, list[Candidate]] = {}
        for c in candidates:
            groups.setdefault(c.trainer.name if c.trainer else "", []).append(c)
        if len(groups) < 2:
            return self._planner(candidates, nodes, settings, favoured)
        parts = divided(groups, nodes)
        plans = [
            self._planner(group, parts[name], settings, favoured) for name, group in groups.items()
        ]
        chosen = {job: taken for plan in plans for job, taken in plan.nodes.items()}
        return Plan(
            {c.job: chosen[c.job] for c in candidates},
            math.nan,
            max(plan.gap for plan in plans),
            sum(plan.solve_s for plan in plans),
        )


def divided(
    groups: Mapping[str, Sequence[Candidate]], nodes: Mapping[str, NodeInfo]
) -> dict[str, dict[str, NodeInfo]]:
    """Trainer → the nodes its plan is made of. ``groups``: trainer → its candidates."""
    pools: dict[str, list[str]] = {}
    for node, info in nodes.items():
        pools.setdefault(info.node_class, []).append(node)
    found: dict[str, dict[str, NodeInfo]] = {name: {} for name in groups}
    for pool, mine in pools.items():
        wishes = {name: _wish(group, pool, nodes) for name, group in groups.items()}
        wishes = {name: wish for name, wish in wishes.items() if wish.most}
        for name, taken in _dealt(wishes, mine).items():
            found[name].update((node, nodes[node]) for node in taken)
    return found


def _wish(group: Sequence[Candidate], pool: str, nodes: Mapping[str, NodeInfo]) -> _Wish:
    able = [c for c in group if c.may_use(pool)]
    wish = _Wish(able[0].trainer.part if able and able[0].trainer else 1.0)
    for c in sorted(able, key=lambda c: not c.fixed):
        held = [n for n in c.nodes if n in nodes and nodes[n].node_class == pool]
        wish.held += held
        if c.fixed:
            wish.stays += len(held)
            wish.most += len(held)
        else:
            wish.due += (c.smallest or 0) if c.must_run else 0
            wish.most += c.max_nodes
    return wish


def _dealt(wishes: Mapping[str, _Wish], nodes: Sequence[str]) -> dict[str, list[str]]:
    if len(wishes) < 2:
        return {name: list(nodes) for name in wishes}
    counts = shares_of(wishes, len(nodes))
    taken = {name: wish.held[: counts[name]] for name, wish in wishes.items()}
    kept = {node for mine in taken.values() for node in mine}
    free = iter(sorted(node for node in nodes if node not in kept))
    for name, mine in taken.items():
        for node in free:
            if len(mine) >= counts[name]:
                free = iter([node, *free])
                break
            mine.append(node)
    return taken


def shares_of(wishes: Mapping[str, _Wish], nodes: int) -> dict[str, int]:
    """How many of ``nodes`` each gets."""
    least, room = {}, nodes - sum(wish.stays for wish in wishes.values())
    for name, wish in wishes.items():
        extra = min(wish.due, room)
        least[name], room = wish.stays + extra, room - extra

    def at(level: float) -> dict[str, int]:
        return {
            name: max(least[name], min(wish.most, math.floor(wish.part * level + 1e-9)))
            for name, wish in wishes.items()
        }

    low, high = 0.0, nodes / min(wish.part for wish in wishes.values()) + 1.0
    for _ in range(_HALVINGS):
        level = (low + high) / 2
        if sum(at(level).values()) <= nodes:
            low = level
        else:
            high = level
    counts = at(low)
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
