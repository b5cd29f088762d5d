"""Trainers: disjoint groups of users, each with its own objective, on separate nodes or on parts of
shared ones. Pure.

A job belongs to exactly one trainer. Values of samples cannot be compared between trainers, so each
trainer has a plan of its own (:mod:`malletrain.core.trainer_plans`). Decides the objective of a
trainer's jobs and which nodes they may use. :mod:`malletrain.daemon.engine.parties` decides which
jobs belong to a trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from allocator import Goal
from malletrain.core.pools import class_of

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
    only: frozenset[str] | None = None
    """Classes of nodes that it may use; None for all except ``never``."""
    never: frozenset[str] = frozenset()
    """Classes of nodes reserved for other trainers."""
    part: float = 1.0
    """Its part of the nodes that it shares with other trainers, in proportion to their parts."""

    @property
    def objective(self) -> str:
        """Objective of its plan, as in the configuration."""
        return self.goal.value if self.deadline_weight is None else "deadlines"

    def phrase(self) -> str:
        """Return a description for users."""
        where = "all nodes"
        if self.only is not None:
            where = f"nodes of {', '.join(sorted(self.only))}"
        elif self.never:
            where = f"all nodes but {', '.join(sorted(self.never))}"
        part = f", part {self.part:g}" if self.part != 1 else ""
        return f"{self.name}: {self.objective}, on {where}{part}"

    def may_use(self, name: str) -> bool:
        """Return whether its jobs may run on nodes of this pool or class."""
        node_class = class_of(name)
        return node_class not in self.never if self.only is None else node_class in self.only


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

    def usable(self, nodes: Mapping[str, int], trainer: Trainer | None) -> Mapping[str, int]:
        """Return the part of ``nodes`` (pool or class → number) that a trainer's jobs may use."""
        if trainer is None:
            return nodes
        return {name: count for name, count in nodes.items() if trainer.may_use(name)}
