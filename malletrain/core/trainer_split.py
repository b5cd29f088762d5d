"""Divides the nodes of one pool among trainers, by their parts and by what their jobs could use.
Pure.

Decides only the numbers. :mod:`malletrain.core.trainer_pools` decides which jobs count in the pool,
:mod:`malletrain.core.trainer_plans` which nodes a trainer gets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from allocator import NodeInfo
from malletrain.core.planning import Candidate


@dataclass
class TrainerDemand:
    """Demand of the jobs of one trainer for nodes of a pool."""

    part: float
    """Trainers divide shared nodes in proportion to their parts."""
    fixed: int = 0
    """Number of nodes of jobs that must keep their nodes."""
    guaranteed: int = 0
    """Number of nodes for guaranteed minimums, in addition to ``fixed``."""
    most: int = 0
    """Maximum number of nodes that all jobs together could use."""
    nodes: list[str] = field(default_factory=list)
    """Nodes of the pool on which the jobs run, those of fixed jobs first."""

    def add(self, candidate: Candidate, nodes: Sequence[str]) -> None:
        """Add a job that runs on ``nodes`` of the pool."""
        if candidate.fixed:
            self.nodes[self.fixed : self.fixed] = nodes
            self.fixed += len(nodes)
            self.most += len(nodes)
        else:
            self.nodes += nodes
            self.guaranteed += (candidate.smallest or 0) if candidate.must_run else 0
            self.most += candidate.max_nodes

    def remove(self, candidate: Candidate) -> None:
        """Remove a job that :meth:`add` added and that is not fixed."""
        self.most -= candidate.max_nodes
        self.nodes = [node for node in self.nodes if node not in candidate.nodes]
        if candidate.must_run:
            self.guaranteed -= candidate.smallest or 0


def part_of(group: Sequence[Candidate]) -> float:
    """Return the part of the trainer of these jobs; 1 without a trainer."""
    return group[0].trainer.part if group and group[0].trainer else 1.0


def demand_of(
    group: Sequence[Candidate], pool: str, nodes: Mapping[str, NodeInfo]
) -> TrainerDemand:
    """Return the demand of one trainer's jobs for nodes of a pool.

    Args:
        group: the trainer's jobs that count in the pool.
        pool: its name.
        nodes: all nodes of the plan, of any pool.
    """
    demand = TrainerDemand(part_of(group))
    for c in group:
        demand.add(c, [n for n in c.nodes if n in nodes and nodes[n].node_class == pool])
    return demand


def split(demands: Mapping[str, TrainerDemand], nodes: int) -> dict[str, int]:
    """Divide the nodes of a pool.

    Args:
        demands: trainer → its demand.
        nodes: number of nodes in the pool.

    Returns:
        Trainer → number of nodes.
    """
    minimums, room = {}, nodes - sum(demand.fixed for demand in demands.values())
    for name, demand in demands.items():
        guaranteed = min(demand.guaranteed, room)
        minimums[name], room = demand.fixed + guaranteed, room - guaranteed
    level = _level(demands, minimums, nodes)
    counts = {
        name: max(minimums[name], min(demand.most, math.floor(demand.part * level + 1e-9)))
        for name, demand in demands.items()
    }
    remaining = nodes - sum(counts.values())

    def order(name: str) -> tuple[bool, float, str]:
        # A trainer that already has more nodes comes first, so that no node moves back and forth.
        demand = demands[name]
        return counts[name] >= len(demand.nodes), (counts[name] + 1) / demand.part, name

    for name in sorted(demands, key=order):
        if remaining > 0 and counts[name] < demands[name].most:
            counts[name] += 1
            remaining -= 1
    return counts


def _level(demands: Mapping[str, TrainerDemand], minimums: Mapping[str, int], nodes: int) -> float:
    """Return the nodes per unit of part at which the trainers together have ``nodes`` nodes, or all
    that they could use (water-filling between ``minimums`` and ``most``).
    """
    spans = [(minimums[n] / d.part, d.most / d.part, d.part) for n, d in demands.items()]
    below, used = 0.0, float(sum(minimums.values()))
    for end in sorted({end for low, high, _ in spans for end in (low, high)} - {0.0}):
        rising = sum(part for low, high, part in spans if low <= below < high)
        if used + rising * (end - below) >= nodes:
            return below + max(0.0, nodes - used) / rising if rising else below
        used += rising * (end - below)
        below = end
    return below
