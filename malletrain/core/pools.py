"""Pools: the nodes of one class that one user leases. A job runs on nodes of one pool of its owner.

The code of a job runs only as the job's owner, and the batch job of a lease runs as the user for
whom it was submitted. So a leased node can serve only that user's jobs. The name of a pool is a
string, like that of a class. If a daemon serves only one user (owner ""), the pools are the
classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from operator import attrgetter

from allocator import NodeInfo

_SEPARATOR = "\x1f"
_CLASS = attrgetter("node_class")


def pool(node_class: str, owner: str) -> str:
    """Return the pool of ``owner``'s nodes of this class."""
    return f"{node_class}{_SEPARATOR}{owner}" if owner else node_class


def class_of(name: str) -> str:
    """Return the class of a pool's nodes."""
    return name.partition(_SEPARATOR)[0]


def class_counts(nodes: Mapping[str, NodeInfo]) -> Counter[str]:
    """Return class → number of ``nodes`` (pool → number, if the pool is their class)."""
    return Counter(map(_CLASS, nodes.values()))


def owner_of(name: str) -> str:
    """Return the owner of the pool's leases."""
    return name.partition(_SEPARATOR)[2]


def is_of_class(name: str, node_class: str) -> bool:
    """Return whether a pool or class is of ``node_class``; empty: of any."""
    return not node_class or class_of(name) == node_class


def by_class(nodes: Mapping[str, int]) -> Counter[str]:
    """Return class → number of nodes from pool → number of nodes. Classes without nodes are
    absent.
    """
    total: Counter[str] = Counter()
    for name, count in nodes.items():
        if count > 0:
            total[class_of(name)] += count
    return total


def largest(nodes: Mapping[str, int], owner: str) -> int:
    """Return the maximum number of nodes that a job of ``owner`` could have at once, from pool →
    number of nodes.
    """
    return max((count for name, count in nodes.items() if owner_of(name) == owner), default=0)
