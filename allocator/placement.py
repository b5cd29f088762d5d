"""Which nodes each job gets, once the sizes are decided.

Decides identities only: a shrinking job keeps a subset of its nodes, a growing one keeps all and
adds free ones; nobody migrates within a class. Where there is a choice, two wishes count, in this
order:

* nodes with similar horizons go to the same job. A job pays for a preemption once however many
  nodes it loses in it, so nodes that end together should end in one job, and new jobs get the nodes
  that stay longest;
* nodes of one topology group (a switch, a dragonfly group) go to the same job.

Horizons are compared in steps of a factor (:data:`STEPS_PER_DOUBLING`), so that groups still count
among nodes that are expected to stay about as long. Nodes without a horizon, or without a group,
are simply alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse

from allocator.outlook import Cohort

STEPS_PER_DOUBLING = 2
"""How finely horizons are told apart."""
_UNKNOWN = 1_000_000
"""Step of a node whose horizon is unknown: nothing says that it ends, so it counts as staying
longest.
"""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What placement knows of a node."""

    node_class: str = "default"
    """Nodes of one class are interchangeable."""
    horizon_s: float | None = None
    """How long its gap is expected to last still, seconds; None when unknown."""
    group: str | None = None
    """Its topology group; None when unknown."""
    cohort: Cohort | None = None
    """The nodes that are expected to end with it; None where nothing is foretold. Bids look at it,
    placement does not.
    """

    def foretold(self, horizon_s: float, cohort: Cohort) -> NodeInfo:
        """The same node with what is foretold of it now."""
        return NodeInfo(self.node_class, horizon_s, self.group, cohort)


class PlacementError(ValueError):
    """Sizes that the nodes present cannot give."""


def place(
    sizes: Mapping[str, tuple[str, int]],
    current: Mapping[str, Sequence[str]],
    nodes: Mapping[str, NodeInfo],
) -> dict[str, tuple[str, ...]]:
    """Nodes by job, for the jobs of ``sizes`` with a size above 0.

    The order of ``current`` and ``nodes`` does not matter. Kept nodes come first and keep their
    order, so that ranks stay stable.

    Args:
        sizes: job -> (node class, size), in the order in which equals choose.
        current: job -> its nodes now, in rank order. Nodes that are gone, or of another class than
            the job's new one, are not kept.
        nodes: every node that can be used now.

    Returns:
        job -> its nodes, in the order of ``sizes``; jobs without nodes are absent.

    Raises:
        PlacementError: when a class has fewer nodes than its jobs are given, or two jobs hold one
            node.
    """
    taken: set[str] = set()
    kept: dict[str, list[str]] = {}
    for job, (node_class, _) in sizes.items():
        names = current.get(job, ())
        infos = map(nodes.get, names)
        kept[job] = mine = [
            name
            for name, info in zip(names, infos, strict=True)
            if info is not None and info.node_class == node_class
        ]
        taken.update(mine)
    if len(taken) < sum(map(len, kept.values())):
        _refuse_twice(kept)
    for job, mine in kept.items():
        if len(mine) > sizes[job][1]:
            kept[job] = _shrunk(mine, sizes[job][1], nodes)
            taken.difference_update(set(mine).difference(kept[job]))
    growing = [job for job, mine in kept.items() if len(mine) < sizes[job][1]]
    pools = {name: _Pool() for name in {sizes[job][0] for job in growing}}
    if growing:
        for name in filterfalse(taken.__contains__, nodes):  # few, where the machine is full
            if (info := nodes[name]).node_class in pools:
                pools[info.node_class].add(name, info)
    # Jobs with nodes have something to match; of the others the larger ones, which a preemption
    # costs most, choose first; of equals who was first.
    growing.sort(key=lambda job: (not kept[job], -sizes[job][1]))
    for job in growing:
        node_class, size = sizes[job]
        pool = pools[node_class]
        need = size - len(kept[job])
        if need > pool.free:
            raise PlacementError(
                f"Job {job} is given {size} nodes of class {node_class}, but beside the "
                f"{len(kept[job])} it keeps only "
                f"{pool.free} are free."
            )
        kept[job] = [*kept[job], *pool.take(need, [nodes[name] for name in kept[job]])]
    return {job: tuple(kept[job]) for job in sizes if kept[job]}


def _refuse_twice(kept: Mapping[str, Sequence[str]]) -> None:
    """Say which of these nodes two jobs have."""
    owner: dict[str, str] = {}
    for job, mine in kept.items():
        for name in mine:
            if owner.setdefault(name, job) != job:
                raise PlacementError(
                    f"Node {name} belongs to both {owner[name]} and {job}; a node runs one job."
                )


def _step(info: NodeInfo) -> int:
    """The horizon in logarithmic steps; under a second counts as a second."""
    if info.horizon_s is None or not info.horizon_s < math.inf:
        return _UNKNOWN
    return int(STEPS_PER_DOUBLING * math.log2(max(1.0, info.horizon_s)))


def _shrunk(mine: list[str], size: int, nodes: Mapping[str, NodeInfo]) -> list[str]:
    """The ``size`` nodes that stay longest; of equals, those in the groups where the job has most,
    then those of lower rank.
    """
    crowd = Counter(nodes[name].group for name in mine)
    rank = {name: r for r, name in enumerate(mine)}
    best = sorted(
        mine,
        key=lambda name: (
            -_step(nodes[name]),
            -crowd[nodes[name].group],
            str(nodes[name].group),
            rank[name],
        ),
    )
    return sorted(best[:size], key=rank.__getitem__)


class _Pool:
    """The free nodes of one class, by step of horizon and group."""

    def __init__(self) -> None:
        self.free = 0
        self._steps: dict[int, dict[str | None, list[str]]] = {}
        self._sorted = False

    def add(self, name: str, info: NodeInfo) -> None:
        """Put a node in."""
        self._steps.setdefault(_step(info), {}).setdefault(info.group, []).append(name)
        self.free += 1

    def take(self, need: int, beside: list[NodeInfo]) -> list[str]:
        """Take ``need`` nodes out for a job that has ``beside``: nearest in horizon to those (else
        the longest), grouped.
        """
        if not self._sorted:
            for groups in self._steps.values():
                for names in groups.values():
                    names.sort(reverse=True)
            self._sorted = True
        self.free -= need
        home: Counter[str | None] = Counter(info.group for info in beside if info.group is not None)
        if beside:
            steps = sorted(_step(info) for info in beside)
            near = steps[len(steps) // 2]
            order = sorted(self._steps, key=lambda step: (abs(step - near), -step))
        else:
            order = sorted(self._steps, reverse=True)
        taken: list[str] = []
        for step in order:
            groups = self._steps[step]
            while groups and len(taken) < need:
                want = need - len(taken)
                group = min(groups, key=lambda g: _preference(g, len(groups[g]), want, home))
                names = groups[group]
                for _ in range(min(want, len(names))):
                    taken.append(names.pop())
                if group is not None:
                    home[group] += 1
                if not names:
                    del groups[group]
            if not groups:
                del self._steps[step]
            if len(taken) == need:
                break
        return taken


def _preference(
    group: str | None, free: int, want: int, home: Mapping[str | None, int]
) -> tuple[int, int, int, str]:
    """Groups the job is in already first (fullest first), then the smallest group that has enough,
    then the largest.
    """
    if home.get(group):
        return (0, -home[group], 0, str(group))
    return (1, 0, free, str(group)) if free >= want else (2, 0, -free, str(group))
