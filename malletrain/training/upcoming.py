"""Which samples a rank needs next, from the order of the sampler: (seed, epoch, position). Pure.

The order of an epoch is known before it begins, so nothing has to be guessed from what was read
before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from malletrain.training.epoch_plan import EpochPlan


@dataclass(frozen=True)
class UpcomingBatch:
    """One batch of a rank."""

    epoch: int
    """Number of its epoch."""
    position: int
    """Position of its global batch in the epoch, samples."""
    samples: tuple[int, ...]
    """Indices of the rank's samples."""


def upcoming_batches(
    plan: EpochPlan,
    order: Callable[[int], Sequence[int] | Any],
    rank: int,
    epoch: int,
    position: int,
    count: int,
) -> list[UpcomingBatch]:
    """Return the next batches of a rank, over the end of the epoch into the next one.

    Args:
        plan: division of an epoch into batches.
        order: function that returns the order of an epoch, by its number: a sequence or a tensor of
            sample indices.
        rank: rank of the process.
        epoch: epoch of the next batch.
        position: position in it, samples over all ranks.
        count: number of batches.
    """
    batches: list[UpcomingBatch] = []
    indices = order(epoch) if count > 0 else ()
    while len(batches) < count:
        size = plan.batch_at(position)
        if not size:
            if position == 0:  # an epoch without a batch
                break
            epoch, position = epoch + 1, 0
            indices = order(epoch)
            continue
        start, length = plan.share(size, rank)
        share = indices[position + start : position + start + length]
        samples = share.tolist() if hasattr(share, "tolist") else list(share)
        batches.append(UpcomingBatch(epoch, position, tuple(samples)))
        position += size
    return batches
