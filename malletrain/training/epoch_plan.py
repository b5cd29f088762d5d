"""The plan of an epoch: its order, its global batches, and each rank's share of them.

Decides which samples form a global batch and who trains on which of them. Pure arithmetic: it knows
no position that was reached (:mod:`malletrain.training.sampler` does) and touches no data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EpochPlan:
    """How an epoch is cut into global batches.

    A remainder smaller than ``max_world_size`` could leave a rank without a sample, and collectives
    would hang. It is therefore taken into the batch before, which grows by up to
    ``max_world_size - 1`` samples. At every step boundary the number of samples left is 0 or at
    least ``max_world_size``.

    Raises:
        ValueError: when the sizes do not fit each other; the message says which.
    """

    num_samples: int
    """Samples of an epoch."""
    global_batch_size: int
    """Samples of a step over all ranks."""
    world_size: int
    """Ranks that share a global batch."""
    max_world_size: int
    """The largest number of ranks the job will ever have."""
    drop_last: bool = False
    """Drop a remainder smaller than a global batch instead of training on it."""

    def __post_init__(self) -> None:
        for name in ("num_samples", "global_batch_size", "world_size", "max_world_size"):
            whole_number(name, getattr(self, name))
        if self.max_world_size < self.world_size:
            raise ValueError(
                f"ElasticSampler: max_world_size is {self.max_world_size}, but there are "
                f"{self.world_size} ranks already; "
                "it is the largest number of ranks the job will ever have."
            )
        if self.num_samples < self.max_world_size:
            raise ValueError(
                f"ElasticSampler: {self.num_samples} samples are fewer than the "
                f"{self.max_world_size} ranks the job may have, so that "
                "some rank would have nothing to train on. Submit the job with fewer nodes at most."
            )

    def check_largest(self, largest: int) -> None:
        """Raises ValueError when an epoch has no batch of ``largest`` samples and none but full
        ones count.
        """
        if self.drop_last and self.num_samples < largest:
            raise ValueError(
                f"ElasticSampler: with drop_last an epoch of {self.num_samples} samples has no "
                f"full global batch of {largest} samples. "
                "Use a smaller batch or drop_last=False."
            )

    def batch_at(self, position: int) -> int:
        """Size of the global batch that starts at ``position``; 0 at the end of the epoch."""
        remaining = self.num_samples - position
        size = self.global_batch_size
        if self.drop_last:
            return size if remaining >= size else 0
        if remaining < self.world_size:
            # only after a state written with a smaller max_world_size: no batch can be made of it
            return 0
        return remaining if remaining - size < self.max_world_size else size

    def share(self, batch: int, rank: int) -> tuple[int, int]:
        """(start, size) of a rank's share of a global batch of ``batch`` samples; sizes differ by
        at most one.
        """
        return piece(batch, self.world_size, rank)

    def steps_from(self, position: int) -> int:
        """Steps from ``position`` to the end of the epoch."""
        remaining = self.num_samples - position
        # full batches for sure; then batch by batch
        steps = max(0, (remaining - self.max_world_size) // self.global_batch_size - 1)
        position += steps * self.global_batch_size
        while size := self.batch_at(position):
            position += size
            steps += 1
        return steps


def piece(total: int, parts: int, index: int) -> tuple[int, int]:
    """(start, size) of the ``index``-th of ``parts`` contiguous pieces of ``total``, whose sizes
    differ by at most one, the larger ones first.
    """
    base, extra = divmod(total, parts)
    return index * base + min(index, extra), base + (index < extra)


def whole_number(name: str, value: object, owner: str = "ElasticSampler") -> None:
    """Raises ValueError when ``value`` is not a whole number from 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{owner}: {name} must be a whole number from 1, not {value!r}.")


def order(num_samples: int, seed: int, epoch: int) -> Any:
    """The permutation of an epoch, a tensor of indices: the same in every process."""
    import torch

    generator = torch.Generator().manual_seed(_mix(seed, epoch))
    return torch.randperm(num_samples, generator=generator)


def _mix(seed: int, epoch: int) -> int:
    """One 32-bit seed from two numbers (splitmix64): torch's CPU generator looks at the lower 32
    bits only.
    """
    value = (seed * 0x9E3779B97F4A7C15 + epoch + 1) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> shift)) * factor % 2**64
    return (value ^ (value >> 31)) % 2**32
