"""Trainers: disjoint groups of users, each with its own objective and its own nodes. Pure.

A job belongs to exactly one trainer, and so does a node class. Values of samples cannot be compared
between trainers, so each has a plan of its own
(:func:`malletrain.core.planning.plan_each_trainer`). Decides the objective of a trainer's jobs and
which nodes they may use. :mod:`malletrain.daemon.engine.parties` decides which jobs belong to a
trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from allocator import Goal
from malletrain.core.pools import Pool, PoolNode

DEADLINES_FIRST = 100.0
"""``deadline_weight`` if deadlines are the objective. It is so large that the earliest deadlines
that can be met come before everything else.
"""
REST = "default"
"""Default name of the trainer for users whom no other trainer names."""


@dataclass(frozen=True)
class Trainer:
    """A trainer: an objective and nodes for the jobs of some users."""

    name: str
    goal: Goal = Goal.THROUGHPUT
    """Goal of its jobs."""
    deadline_weight: float | None = None
    """Weight of a node that a deadline needs; None for the site's weight."""
    node_classes: frozenset[str] | None = None
    """Classes of its nodes; None for all except ``other_classes``."""
    other_classes: frozenset[str] = frozenset()
    """Classes of the other trainers' nodes."""

    @property
    def objective(self) -> str:
        """Objective of its plan, as in the configuration."""
        return self.goal.value if self.deadline_weight is None else "deadlines"

    def phrase(self) -> str:
        """Return a description for users."""
        where = "all nodes"
        if self.node_classes is not None:
            where = f"nodes of {', '.join(sorted(self.node_classes))}"
        elif self.other_classes:
            where = f"all nodes but {', '.join(sorted(self.other_classes))}"
        return f"{self.name}: {self.objective}, on {where}"

    def may_use(self, node_class: str) -> bool:
        """Return whether its jobs may run on nodes of this class."""
        if self.node_classes is None:
            return node_class not in self.other_classes
        return node_class in self.node_classes

    def own(self, nodes: Mapping[str, PoolNode]) -> dict[str, PoolNode]:
        """Return those of ``nodes`` that its jobs may use."""
        present = {info.pool for info in nodes.values()}
        pools = {pool for pool in present if self.may_use(pool.node_class)}
        return {node: info for node, info in nodes.items() if info.pool in pools}


class Trainers:
    """The trainers of one controller. The last one takes the users whom no other names."""

    def __init__(self, trainers: Sequence[Trainer] = ()) -> None:
        self._by_name = {trainer.name: trainer for trainer in trainers}
        self._rest = trainers[-1] if trainers else None

    def __iter__(self) -> Iterator[Trainer | None]:
        """Yield each trainer; a single None if there are none."""
        return iter(self._by_name.values() or (None,))

    def of(self, name: str) -> Trainer | None:
        """Return the trainer of this name; None if there are no trainers."""
        return self._by_name.get(name, self._rest)

    def of_class(self, node_class: str) -> Trainer | None:
        """Return the trainer of the nodes of this class; None if they belong to none."""
        return next((t for t in self._by_name.values() if t.may_use(node_class)), None)

    def usable(self, nodes: Mapping[Pool, int], trainer: Trainer | None) -> Mapping[Pool, int]:
        """Return the part of ``nodes`` (pool → number) that a trainer's jobs may use."""
        if trainer is None:
            return nodes
        return {pool: count for pool, count in nodes.items() if trainer.may_use(pool.node_class)}
