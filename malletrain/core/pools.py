"""Who may use which nodes: pools by the user who leases them, trainers by their users. Pure.

A pool has the nodes of one class that one user leases or could lease. A job runs on nodes of one
pool of its owner. The code of a job runs only as the job's owner, and the batch job of a lease runs
as the user for whom it was submitted. So a leased node can serve only that user's jobs.

The owner "" is the daemon's own user. Where the owner does not matter (gaps, which nobody
leases yet, and plans in which every user can get every node), the nodes of a class are in one pool
with the empty owner. If a daemon serves only its own user, all its pools are such.

Trainers are disjoint groups of users, each with its own objective and its own nodes. A job belongs
to exactly one trainer, and so does a node class. Values of samples cannot be compared between
trainers, so each has a plan of its own (:func:`malletrain.core.planning.plan_each_trainer`).
Decides the objective of a trainer's jobs and which nodes they may use.
:mod:`malletrain.daemon.engine.parties` decides which jobs belong to a trainer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

from allocator import Goal, NodeInfo

DEFAULT_CLASS = "default"
"""Class of a node without one."""
_POOL = attrgetter("pool")


class Pool:
    """A class of nodes, and the user who leases them. Immutable.

    There is one object for each pool, so that pools are compared and hashed as objects: plans do
    that for every node, and it is faster than for tuples or strings.

    Args:
        node_class: class of its nodes.
        owner: user who leases its nodes; empty: the daemon's own user, or where it does not matter.
    """

    __slots__ = ("node_class", "owner")
    node_class: str
    owner: str

    def __new__(cls, node_class: str, owner: str = "") -> Pool:
        """Return the pool."""
        pool = _POOLS.get((node_class, owner))
        if pool is None:
            pool = object.__new__(cls)
            object.__setattr__(pool, "node_class", node_class)
            object.__setattr__(pool, "owner", owner)
            pool = _POOLS.setdefault((node_class, owner), pool)
        return pool

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"A pool cannot be changed: {name}.")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"A pool cannot be changed: {name}.")

    def __reduce__(self) -> tuple[type[Pool], tuple[str, str]]:
        return Pool, (self.node_class, self.owner)

    @property
    def order(self) -> tuple[str, str]:
        """Sort key: by class, then by owner. A method ``__lt__`` would make ``==`` three times as
        slow.
        """
        return self.node_class, self.owner

    def __repr__(self) -> str:
        return f"Pool({self.node_class!r}, {self.owner!r})"

    def __str__(self) -> str:
        """Return its name in sentences."""
        return f"{self.node_class} of {self.owner}" if self.owner else self.node_class

    def is_of_class(self, node_class: str) -> bool:
        """Return whether its nodes are of ``node_class``; empty: of any."""
        return not node_class or self.node_class == node_class


_POOLS: dict[tuple[str, str], Pool] = {}
"""(class, owner) → its pool."""
PoolNode: TypeAlias = NodeInfo[Pool]
"""The properties of a node, with its pool. For annotations: NodeInfo makes one."""


def pool_sizes(nodes: Mapping[str, PoolNode]) -> Counter[Pool]:
    """Return pool → number of ``nodes``."""
    return Counter(map(_POOL, nodes.values()))


def by_class(sizes: Mapping[Pool, int]) -> Counter[str]:
    """Return class → number of nodes from pool → number of nodes. Classes without nodes are
    absent.
    """
    total: Counter[str] = Counter()
    for pool, count in sizes.items():
        if count > 0:
            total[pool.node_class] += count
    return total


def largest(sizes: Mapping[Pool, int], owner: str) -> int:
    """Return the maximum number of nodes that a job of ``owner`` could have at once, from pool →
    number of nodes.
    """
    return max((count for pool, count in sizes.items() if pool.owner == owner), default=0)


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
