"""Computes what a change of the number of ranks must move of a sharded state, and the figures of a
benchmark. Pure; its results are known beforehand.

The first dimension of each tensor is sharded, in contiguous chunks as ``torch.chunk`` cuts them
(``fully_shard``), so that rank r of W has rows [r·c, (r+1)·c) of n, c = ⌈n / W⌉.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tensor:
    """A tensor of the state."""

    rows: int
    """Size of its first dimension."""
    row_bytes: int
    """Bytes of one row."""


def rows_of(rows: int, rank: int, world: int) -> tuple[int, int]:
    """Return the rows (first, past the last) of ``rank`` of ``world``."""
    chunk = -(-rows // world)
    return min(rows, rank * chunk), min(rows, (rank + 1) * chunk)


def shard_bytes(tensors: Iterable[Tensor], rank: int, world: int) -> int:
    """Return the bytes of the state at ``rank`` of ``world``."""
    total = 0
    for tensor in tensors:
        first, end = rows_of(tensor.rows, rank, world)
        total += (end - first) * tensor.row_bytes
    return total


def overlaps(tensors: Sequence[Tensor], old: int, new: int) -> np.ndarray:
    """Return [old, new]: the bytes that a rank of the old layout has of the shards of a rank of the
    new one.
    """
    bytes_held = np.zeros((old, new), dtype=np.int64)
    for tensor in tensors:
        a = np.array([rows_of(tensor.rows, r, old) for r in range(old)])
        b = np.array([rows_of(tensor.rows, r, new) for r in range(new)])
        first = np.maximum(a[:, None, 0], b[None, :, 0])
        end = np.minimum(a[:, None, 1], b[None, :, 1])
        bytes_held += np.maximum(0, end - first) * tensor.row_bytes
    return bytes_held


def best_order(
    tensors: Sequence[Tensor], old: int, new: int, stay: Sequence[int]
) -> dict[int, int]:
    """Return the new rank of each old one that stays, so that the fewest bytes move.

    Args:
        tensors: the state.
        old, new: numbers of ranks before and after.
        stay: old ranks that stay; the others have left, and the rest of the new ranks are joiners.
    """
    from scipy.optimize import linear_sum_assignment  # importing scipy takes half a second

    if not stay:
        return {}
    overlap = overlaps(tensors, old, new)[list(stay)]
    rows, columns = linear_sum_assignment(overlap, maximize=True)
    return {stay[row]: int(column) for row, column in zip(rows, columns, strict=True)}


def least(tensors: Sequence[Tensor], old: int, new: int, stay: Sequence[int]) -> int:
    """Return the minimum number of bytes that must reach ranks, over all orders of the new ranks.
    For the arguments see :func:`best_order`.
    """
    whole = sum(tensor.rows * tensor.row_bytes for tensor in tensors)
    overlap = overlaps(tensors, old, new)
    return int(whole - sum(overlap[pair] for pair in best_order(tensors, old, new, stay).items()))


def in_order(tensors: Sequence[Tensor], old: int, new: int) -> int:
    """Return the bytes that must reach ranks if rank r stays rank r."""
    whole = sum(tensor.rows * tensor.row_bytes for tensor in tensors)
    return int(whole - np.trace(overlaps(tensors, old, new)))


def apart(losses: Mapping[int, float], undisturbed: Mapping[int, float]) -> float:
    """Return the largest relative difference between two loss curves, over the steps of both.
    Raises ValueError if they have no step in common.
    """
    both = losses.keys() & undisturbed.keys()
    if not both:
        raise ValueError("The two runs have no step in common.")
    return max(abs(losses[s] - undisturbed[s]) / abs(undisturbed[s]) for s in both)


def over(pause_s: float, moved: float, bandwidth: float) -> float:
    """Return a pause divided by the time to move ``moved`` bytes at the measured bandwidth
    (bytes/s).
    """
    return pause_s / (moved / bandwidth)
