"""Which node owns a sample: rendezvous hashing. Pure.

Every process of a job computes the same owner from the names of the nodes, without a table and
without a message. If a node leaves, only its samples get another owner, spread evenly over the
others; if one joins, it becomes the owner of an equal share, taken evenly from all.

The scheme is that of Thaler and Ravishankar, "Using name-based mappings to increase hit rates",
IEEE/ACM Transactions on Networking 6(1), 1998.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def owners(samples: Sequence[int], nodes: Sequence[str]) -> list[str]:
    """Return the node that owns each of ``samples``.

    Args:
        samples: indices of samples, each from 0.
        nodes: names of the nodes of the job, at least one, in any order.

    Raises:
        ValueError: there are no nodes.
    """
    if not nodes:
        raise ValueError("A sample has no owner in a job without nodes.")
    names = sorted(set(nodes))
    if len(names) == 1:
        return [names[0]] * len(samples)
    indices = np.asarray(samples, dtype=np.uint64)
    best = np.zeros(len(indices), dtype=np.int64)
    highest = _weights(indices, names[0])
    for number, name in enumerate(names[1:], 1):
        weights = _weights(indices, name)
        higher = weights > highest
        best[higher] = number
        np.maximum(highest, weights, out=highest)
    return [names[number] for number in best.tolist()]


def _weights(indices: Any, node: str) -> Any:
    """Return the weight of each sample on a node: splitmix64 of the sample, seeded by the node."""
    seed = int.from_bytes(hashlib.blake2b(node.encode(), digest_size=8).digest(), "little")
    value = (indices + np.uint64(1)) * _GOLDEN ^ np.uint64(seed)
    value = (value ^ (value >> _SHIFTS[0])) * _MULTIPLIERS[0]
    value = (value ^ (value >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return value ^ (value >> _SHIFTS[2])
