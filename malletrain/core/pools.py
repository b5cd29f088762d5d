"""Pools: the nodes of one class that one user leases or could lease. A job runs on nodes of one
pool of its owner.

The code of a job runs only as the job's owner, and the batch job of a lease runs as the user for
whom it was submitted. So a leased node can serve only that user's jobs.

The owner "" is the daemon's own user. Where the owner does not matter (gaps, which nobody
leases yet, and plans in which every user can get every node), the nodes of a class are in one pool
with the empty owner. If a daemon serves only its own user, all its pools are such.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from operator import attrgetter
from typing import TypeAlias

from allocator import NodeInfo

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
