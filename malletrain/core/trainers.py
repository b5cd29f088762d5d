"""Trainers: disjoint parts of the users with an objective each, on nodes of their own or on parts
of the same ones. Pure.

A job belongs to exactly one trainer. Values of samples cannot be compared between trainers, so each
trainer has a plan of its own (:mod:`malletrain.core.trainer_plans`). Decides by what a trainer's
jobs are valued and which nodes they may use. :mod:`malletrain.daemon.parties` decides which jobs
belong to a trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from allocator import Goal
from malletrain.core.pools import class_of

DEADLINES_FIRST = 100.0
"""Where deadlines are the objective, a node that one needs counts so many times what it would bring
another job: the earliest that can be held come before everything else.
"""
REST = "default"
"""The trainer of those whom nobody names, where the site names none for them."""


@dataclass(frozen=True)
class Trainer:
    """One of them."""

    name: str
    goal: Goal = Goal.THROUGHPUT
    """What more nodes must bring its jobs."""
    deadline_weight: float | None = None
    """What a node that a deadline needs counts; None: what the site says."""
    only: frozenset[str] | None = None
    """The classes of nodes that are its own; None: all but ``never``."""
    never: frozenset[str] = frozenset()
    """Classes that are others' own."""
    part: float = 1.0
    """In what proportion it has the nodes that others may use, too."""

    @property
    def objective(self) -> str:
        """What its plan maximises, in the configuration's word."""
        return self.goal.value if self.deadline_weight is None else "deadlines"

    def phrase(self) -> str:
        """What it is, for people."""
        where = "all nodes"
        if self.only is not None:
            where = f"nodes of {', '.join(sorted(self.only))}"
        elif self.never:
            where = f"all nodes but {', '.join(sorted(self.never))}"
        part = f", part {self.part:g}" if self.part != 1 else ""
        return f"{self.name}: {self.objective}, on {where}{part}"

    def may_use(self, name: str) -> bool:
        """Whether its jobs may run on nodes of this pool or class."""
        node_class = class_of(name)
        return node_class not in self.never if self.only is None else node_class in self.only


class Trainers:
    """Those of one controller. ``trainers``: the last one takes whom nobody names."""

    def __init__(self, trainers: Sequence[Trainer] = ()) -> None:
        self._by_name = {trainer.name: trainer for trainer in trainers}
        self._rest = trainers[-1] if trainers else None

    def __iter__(self) -> Iterator[Trainer | None]:
        """Each of them; None alone where there are none."""
        return iter(self._by_name.values() or (None,))

    def of(self, name: str) -> Trainer | None:
        """The trainer of this name; None where there are none at all."""
        return self._by_name.get(name, self._rest)

    def usable(self, nodes: Mapping[str, int], trainer: Trainer | None) -> Mapping[str, int]:
        """Those of ``nodes`` (pool or class → how many) that a trainer's jobs may use."""
        if trainer is None:
            return nodes
        return {name: count for name, count in nodes.items() if trainer.may_use(name)}
