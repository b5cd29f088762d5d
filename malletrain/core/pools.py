"""Pools: the nodes of one class whose leases belong to one user. A job runs on nodes of one pool of
its owner.

Code of a job runs only as the job's owner, and the batch job of a lease runs as the user for whom
it was submitted, so a leased node can serve only that user's jobs. A pool is named by a text, as
classes are. If a daemon serves one user only (owner ""), a pool is its class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from operator import attrgetter

from allocator import NodeInfo

_BETWEEN = "\x1f"
_CLASS = attrgetter("node_class")


def pool(node_class: str, owner: str) -> str:
    """The pool of ``owner``'s nodes of this class."""
    return f"{node_class}{_BETWEEN}{owner}" if owner else node_class


def class_of(name: str) -> str:
    """The class of a pool's nodes."""
    return name.partition(_BETWEEN)[0]


def class_counts(nodes: Mapping[str, NodeInfo]) -> Counter[str]:
    """How many of ``nodes`` are of each class (or pool, where that is their class)."""
    return Counter(map(_CLASS, nodes.values()))


def owner_of(name: str) -> str:
    """Whose leases are in the pool."""
    return name.partition(_BETWEEN)[2]


def by_class(nodes: Mapping[str, int]) -> Counter[str]:
    """Pool → number of nodes, added up to class → number of nodes; none of those without a node."""
    total: Counter[str] = Counter()
    for name, count in nodes.items():
        if count > 0:
            total[class_of(name)] += count
    return total


def largest(nodes: Mapping[str, int], owner: str) -> int:
    """The most nodes that a job of ``owner`` could have at once, of pool → number of nodes."""
    return max((count for name, count in nodes.items() if owner_of(name) == owner), default=0)
