"""Placement: which nodes each job gets, once the sizes are decided.

Decides identities only. A shrinking job keeps a subset of its nodes, the busy ones first; a growing
one keeps all and adds free ones; no job migrates within a pool. Among equally possible nodes two
preferences apply, in this order:

* Nodes with similar horizons go to the same job. A job pays once for a preemption, however many
  nodes it loses, so nodes that end together should belong to one job. New jobs get the nodes that
  stay longest.
* Nodes of one topology group (a switch, a dragonfly group) go to the same job.

Horizons are compared in logarithmic steps (:data:`STEPS_PER_DOUBLING`), so that groups still matter
among nodes with about the same horizon. Nodes without a horizon, or without a group, are equal to
each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from typing import Generic

from allocator.bids import Assignment, PoolT

STEPS_PER_DOUBLING = 2
"""Resolution at which horizons are compared."""
_UNKNOWN_HORIZON_STEP = 1_000_000
"""Step of a node without a horizon: it counts as staying longest."""


@dataclass(frozen=True, slots=True)
class NodeInfo(Generic[PoolT]):
    """The properties of a node that plans use."""

    pool: PoolT
    """Its pool; nodes of one pool are interchangeable."""
    horizon_s: float | None = None
    """Expected remaining length of its gap, seconds; None if unknown."""
    group: str | None = None
    """Its topology group; None if unknown."""
    busy: bool = False
    """Whether work on it would be lost if its job gave it up now, while other nodes are idle."""
    reread_s: float = 0.0
    """Time in which its job would read training data again if it gave the node up, seconds."""

    def with_horizon(self, horizon_s: float | None) -> NodeInfo[PoolT]:
        """Return the same node with another horizon, seconds."""
        return NodeInfo(self.pool, horizon_s, self.group, self.busy, self.reread_s)

    def with_pool(self, pool: PoolT) -> NodeInfo[PoolT]:
        """Return the same node in another pool."""
        return NodeInfo(pool, self.horizon_s, self.group, self.busy, self.reread_s)


class PlacementError(ValueError):
    """The nodes cannot provide the sizes, or two jobs hold one node."""


def place(
    sizes: Mapping[str, Assignment[PoolT]],
    current: Mapping[str, Sequence[str]],
    nodes: Mapping[str, NodeInfo[PoolT]],
    longest: Collection[str] = (),
) -> dict[str, tuple[str, ...]]:
    """Choose the nodes of every job of ``sizes`` with a size above 0.

    The order of ``current`` and ``nodes`` does not matter. A job's current nodes come first and
    keep their order, so that ranks are stable.

    Args:
        sizes: job -> (pool, size). The order breaks ties.
        current: job -> its nodes now, in rank order. A job gives up nodes that are absent from
            ``nodes`` or of another pool than its new one.
        nodes: all usable nodes.
        longest: jobs that choose before the others, and get the nodes that stay longest even if
            they have nodes already.

    Returns:
        job -> its nodes, in the order of ``sizes``; jobs without nodes are absent.

    Raises:
        PlacementError: if a pool has too few nodes, or two jobs hold one node.
    """
    in_use: set[str] = set()
    plan: dict[str, list[str]] = {}
    for job, (pool, _) in sizes.items():
        names = current.get(job, ())
        infos = map(nodes.get, names)
        plan[job] = usable = [
            name
            for name, info in zip(names, infos, strict=True)
            if info is not None and info.pool == pool
        ]
        in_use.update(usable)
    if len(in_use) < sum(map(len, plan.values())):
        _raise_shared_node(plan)
    for job, usable in plan.items():
        if len(usable) > sizes[job][1]:
            plan[job] = _shrink(usable, sizes[job][1], nodes)
            in_use.difference_update(set(usable).difference(plan[job]))
    growing = [job for job, usable in plan.items() if len(usable) < sizes[job][1]]
    free_nodes = {pool: _FreeNodes() for pool in {sizes[job][0] for job in growing}}
    if growing:
        for name in filterfalse(in_use.__contains__, nodes):  # few on a full machine
            if (info := nodes[name]).pool in free_nodes:
                free_nodes[info.pool].add(name, info)
    # Jobs with nodes choose first, because they have horizons and groups to match; then the larger
    # ones, for which a preemption costs most.
    growing.sort(key=lambda job: (job not in longest, not plan[job], -sizes[job][1]))
    for job in growing:
        pool, size = sizes[job]
        free = free_nodes[pool]
        count = size - len(plan[job])
        if count > free.count:
            raise PlacementError(
                f"The plan gives job {job} {size} nodes of pool {pool}, but besides the "
                f"{len(plan[job])} that it keeps only {free.count} are free."
            )
        beside = [nodes[name] for name in plan[job]]
        plan[job] = [*plan[job], *free.take(count, beside, longest=job in longest)]
    return {job: tuple(plan[job]) for job in sizes if plan[job]}


def _raise_shared_node(plan: Mapping[str, Sequence[str]]) -> None:
    """Raise the error for the first node that two jobs hold."""
    owner: dict[str, str] = {}
    for job, names in plan.items():
        for name in names:
            if owner.setdefault(name, job) != job:
                raise PlacementError(
                    f"Node {name} belongs to both {owner[name]} and {job}; a node runs one job."
                )


def _horizon_step(info: NodeInfo[PoolT]) -> int:
    """Return the horizon in logarithmic steps; less than a second counts as a second."""
    if info.horizon_s is None or not info.horizon_s < math.inf:
        return _UNKNOWN_HORIZON_STEP
    return int(STEPS_PER_DOUBLING * math.log2(max(1.0, info.horizon_s)))


def _shrink(names: list[str], size: int, nodes: Mapping[str, NodeInfo[PoolT]]) -> list[str]:
    """Return ``size`` nodes: the busy ones first, then those that stay longest; of equals, those in
    the groups where the job has most nodes, then those with most training data in memory, then
    those of lower rank.
    """
    nodes_in_group = Counter(nodes[name].group for name in names)
    rank = {name: r for r, name in enumerate(names)}

    def preference(name: str) -> tuple[bool, int, int, float, str, int]:
        info = nodes[name]
        return (
            not info.busy,
            -_horizon_step(info),
            -nodes_in_group[info.group],
            -info.reread_s,
            str(info.group),
            rank[name],
        )

    return sorted(sorted(names, key=preference)[:size], key=rank.__getitem__)


class _FreeNodes:
    """The free nodes of one pool, by horizon step and topology group."""

    def __init__(self) -> None:
        self.count = 0
        self._steps: dict[int, dict[str | None, list[str]]] = {}
        self._sorted = False

    def add(self, name: str, info: NodeInfo[PoolT]) -> None:
        """Add a free node."""
        self._steps.setdefault(_horizon_step(info), {}).setdefault(info.group, []).append(name)
        self.count += 1

    def take(
        self, count: int, current: list[NodeInfo[PoolT]], *, longest: bool = False
    ) -> list[str]:
        """Remove and return ``count`` nodes for a job whose nodes are ``current``.

        They are the closest in horizon to the job's median node, or those that stay longest if it
        has none or ``longest``; within one step of horizon, by group.
        """
        if not self._sorted:
            for groups in self._steps.values():
                for names in groups.values():
                    names.sort(reverse=True)
            self._sorted = True
        self.count -= count
        nodes_in_group: Counter[str | None] = Counter(
            info.group for info in current if info.group is not None
        )
        if current and not longest:
            steps = sorted(_horizon_step(info) for info in current)
            median = steps[len(steps) // 2]
            order = sorted(self._steps, key=lambda step: (abs(step - median), -step))
        else:
            order = sorted(self._steps, reverse=True)
        chosen: list[str] = []
        for step in order:
            groups = self._steps[step]
            while groups and len(chosen) < count:
                missing = count - len(chosen)
                group = min(
                    groups, key=lambda g: _preference(g, len(groups[g]), missing, nodes_in_group)
                )
                names = groups[group]
                for _ in range(min(missing, len(names))):
                    chosen.append(names.pop())
                if group is not None:
                    nodes_in_group[group] += 1
                if not names:
                    del groups[group]
            if not groups:
                del self._steps[step]
            if len(chosen) == count:
                break
        return chosen


def _preference(
    group: str | None, free: int, missing: int, nodes_in_group: Mapping[str | None, int]
) -> tuple[int, int, int, str]:
    """Return the sort key of a group: first those where the job has nodes, most nodes first; then
    the smallest that is large enough; then the largest.

    Args:
        group: the group.
        free: its free nodes.
        missing: nodes that the job still needs.
        nodes_in_group: the job's nodes by group.
    """
    if nodes_in_group.get(group):
        return (0, -nodes_in_group[group], 0, str(group))
    return (1, 0, free, str(group)) if free >= missing else (2, 0, -free, str(group))
