"""What a change of the number of ranks has to move of a sharded state, and what a benchmark of it
makes of its measurements. Pure; the figures are known beforehand.

Sharded is each tensor's first dimension, in contiguous chunks as ``torch.chunk`` cuts them
(``fully_shard``), so rank r of W holds rows [r·c, (r+1)·c) of n, c = ⌈n / W⌉.
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
    """The rows (first, past the last) of ``rank`` of ``world``."""
    chunk = -(-rows // world)
    return min(rows, rank * chunk), min(rows, (rank + 1) * chunk)


def shard_bytes(tensors: Iterable[Tensor], rank: int, world: int) -> int:
    """Bytes of the state at ``rank`` of ``world``."""
    total = 0
    for tensor in tensors:
        first, end = rows_of(tensor.rows, rank, world)
        total += (end - first) * tensor.row_bytes
    return total


def overlaps(tensors: Sequence[Tensor], old: int, new: int) -> np.ndarray:
    """[old, new]: bytes that a rank of the old layout holds of a rank of the new one's shards."""
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
    """Which new rank each old one that stays takes, so that the fewest bytes move.

    Args:
        tensors: the state.
        old, new: numbers of ranks before and after.
        stay: old ranks that are among the new ones; the others left, and the rest are newcomers.
    """
    from scipy.optimize import linear_sum_assignment  # importing scipy takes half a second

    if not stay:
        return {}
    overlap = overlaps(tensors, old, new)[list(stay)]
    rows, columns = linear_sum_assignment(overlap, maximize=True)
    return {stay[row]: int(column) for row, column in zip(rows, columns, strict=True)}


def least(tensors: Sequence[Tensor], old: int, new: int, stay: Sequence[int]) -> int:
    """The fewest bytes that reach ranks anew, over all orders of the new ranks; the arguments are
    those of :func:`best_order`.
    """
    whole = sum(tensor.rows * tensor.row_bytes for tensor in tensors)
    overlap = overlaps(tensors, old, new)
    return int(whole - sum(overlap[pair] for pair in best_order(tensors, old, new, stay).items()))


def in_order(tensors: Sequence[Tensor], old: int, new: int) -> int:
    """The bytes that reach ranks anew when rank r stays rank r."""
    whole = sum(tensor.rows * tensor.row_bytes for tensor in tensors)
    return int(whole - np.trace(overlaps(tensors, old, new)))


def apart(losses: Mapping[int, float], undisturbed: Mapping[int, float]) -> float:
    """The largest relative difference between two loss curves, over the steps of both. Raises
    ValueError when they have none in common.
    """
    both = losses.keys() & undisturbed.keys()
    if not both:
        raise ValueError("The two runs have no step in common.")
    return max(abs(losses[s] - undisturbed[s]) / abs(undisturbed[s]) for s in both)


def over(pause_s: float, moved: float, bandwidth: float) -> float:
    """A pause beside what moving so many bytes takes at the measured bandwidth (bytes/s)."""
    return pause_s / (moved / bandwidth)
