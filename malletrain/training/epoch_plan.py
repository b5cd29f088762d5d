"""The plan of an epoch: which rank reads what of it. Pure: the current position is in
:mod:`malletrain.training.sampler` and :mod:`malletrain.training.stream`, no data is read and
nothing is sent to other ranks.

:class:`EpochPlan`, for data sets with an index: the order of the samples, which of them form a
global batch, which rank trains on which, and the samples that a rank needs next. The order of an
epoch is known before it begins, so nothing has to be guessed from what was read before.

:func:`deal`, for streams: which reader gets which of the remaining shards of an epoch, and the
position of all ranks from the readers' cursors. A *place* is a shard's index in the order of the
epoch. A *cursor* is (index into the reader's list, number of records of that shard that are done).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EpochPlan:
    """The division of an epoch into global batches.

    A remainder smaller than ``max_world_size`` could leave a rank without a sample, and collectives
    would hang. So it joins the batch before, which grows by up to ``max_world_size - 1`` samples.
    At every step boundary the number of remaining samples is 0 or at least ``max_world_size``.

    Raises:
        ValueError: the sizes are inconsistent; the message names them.
    """

    num_samples: int
    """Number of samples of an epoch."""
    global_batch_size: int
    """Number of samples of a step over all ranks."""
    world_size: int
    """Number of ranks that share a global batch."""
    max_world_size: int
    """Maximum number of ranks of the job."""
    drop_last: bool = False
    """Whether a remainder smaller than a global batch is dropped instead of trained on."""

    def __post_init__(self) -> None:
        for name in ("num_samples", "global_batch_size", "world_size", "max_world_size"):
            whole_number(name, getattr(self, name))
        if self.max_world_size < self.world_size:
            raise ValueError(
                f"ElasticSampler: max_world_size is {self.max_world_size}, but there are "
                f"{self.world_size} ranks already. "
                "Set it to the largest number of ranks the job will ever have."
            )
        if self.num_samples < self.max_world_size:
            raise ValueError(
                f"ElasticSampler: {self.num_samples} samples are fewer than the "
                f"{self.max_world_size} ranks the job may have, so that "
                "some rank would have nothing to train on. Submit the job with fewer nodes at most."
            )

    def check_smallest(self) -> None:
        """Raise ValueError if some rank of the largest world would have no sample of a global
        batch.
        """
        if self.global_batch_size < self.max_world_size:
            raise ValueError(
                f"ElasticSampler: a global batch of {self.global_batch_size} samples cannot be "
                f"shared by the {self.max_world_size} ranks the job may have. Raise "
                "global_batch_size or submit the job with fewer nodes at most."
            )

    def check_largest(self, largest: int) -> None:
        """Raise ValueError if ``drop_last`` is set and an epoch has fewer than ``largest`` samples,
        the largest global batch of the job.
        """
        if self.drop_last and self.num_samples < largest:
            raise ValueError(
                f"ElasticSampler: with drop_last an epoch of {self.num_samples} samples has no "
                f"full global batch of {largest} samples. "
                "Use a smaller batch or drop_last=False."
            )

    def batch_at(self, position: int) -> int:
        """Return the number of samples of the global batch that starts at ``position``; 0 at the
        end of the epoch.
        """
        remaining = self.num_samples - position
        size = self.global_batch_size
        if self.drop_last:
            return size if remaining >= size else 0
        if remaining < self.world_size:
            # only after a state that was written with a smaller max_world_size: too few for a batch
            return 0
        return remaining if remaining - size < self.max_world_size else size

    def share(self, batch: int, rank: int) -> tuple[int, int]:
        """Return (start, size) of a rank's share of a global batch of ``batch`` samples. Sizes
        differ by at most one.
        """
        return piece(batch, self.world_size, rank)

    def steps_from(self, position: int) -> int:
        """Return the number of steps from ``position`` to the end of the epoch."""
        remaining = self.num_samples - position
        # first the batches that are certainly full; then batch by batch
        steps = max(0, (remaining - self.max_world_size) // self.global_batch_size - 1)
        position += steps * self.global_batch_size
        while size := self.batch_at(position):
            position += size
            steps += 1
        return steps


def piece(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return (start, size) of one of several contiguous pieces. Sizes differ by at most one; the
    larger pieces come first.

    Args:
        total: size of the whole.
        parts: number of pieces.
        index: number of the piece, from 0.
    """
    base, extra = divmod(total, parts)
    return index * base + min(index, extra), base + (index < extra)


def whole_number(name: str, value: object, caller: str = "ElasticSampler") -> None:
    """Check that a value is a whole number of at least 1.

    Args:
        name: name of the value, for the message.
        value: the value.
        caller: name of the class or function to which it was passed, for the message.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{caller}: {name} must be a whole number from 1, not {value!r}.")


def order(num_samples: int, seed: int, epoch: int) -> Any:
    """Return the permutation of an epoch: a tensor of sample indices, the same in every process.

    Args:
        num_samples: length of the dataset.
        seed: seed of the run.
        epoch: number of the epoch, from 0.
    """
    import torch

    generator = torch.Generator().manual_seed(_mix(seed, epoch))
    return torch.randperm(num_samples, generator=generator)


def _mix(seed: int, epoch: int) -> int:
    """Return one 32-bit seed for two numbers (splitmix64), because torch's CPU generator uses only
    the lower 32 bits.
    """
    value = (seed * 0x9E3779B97F4A7C15 + epoch + 1) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> shift)) * factor % 2**64
    return (value ^ (value >> 31)) % 2**32


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


Cursor = tuple[int, int]


@dataclass(frozen=True)
class StreamPosition:
    """Position in an epoch, over all ranks."""

    shards: int
    """Number of shards of the dataset."""
    done: frozenset[int] = frozenset()
    """Places of which all records are done."""
    begun: Mapping[int, int] = field(default_factory=dict)
    """Number of records done, by place, for places that are begun and not done."""

    def remaining(self) -> list[int]:
        """Return the places that are not done, in the order of the epoch."""
        return [place for place in range(self.shards) if place not in self.done]

    def state(self) -> dict[str, Any]:
        """Return plain numbers: ranges of done places as [first, last + 1], begun places as [place,
        records done].
        """
        return {
            "done": [list(span) for span in _spans(sorted(self.done))],
            "begun": [list(pair) for pair in sorted(self.begun.items())],
        }

    @classmethod
    def from_state(cls, shards: int, state: Mapping[str, Any]) -> StreamPosition:
        """Return the position of a state of :meth:`state`.

        Raises:
            ValueError: the state names a place that a dataset of ``shards`` shards does not have.
        """
        done = frozenset(p for first, last in state["done"] for p in range(int(first), int(last)))
        begun = {int(place): int(records) for place, records in state["begun"]}
        places = done | set(begun)
        if places and not 0 <= min(places) <= max(places) < shards:
            raise ValueError(
                f"ElasticStream: the state names a shard beyond the {shards} of this stream. "
                "Train with the same shards, or start anew with another snapshot path."
            )
        return cls(shards, done, begun)


def _spans(places: Iterable[int]) -> Iterable[tuple[int, int]]:
    first = span_end = -1
    for place in places:
        if place != span_end:
            if first >= 0:
                yield first, span_end
            first = place
        span_end = place + 1
    if first >= 0:
        yield first, span_end


@dataclass(frozen=True)
class Deal:
    """The remaining shards of an epoch, dealt out to readers."""

    base: StreamPosition
    """Position from which the shards were dealt out."""
    lists: tuple[tuple[tuple[int, int], ...], ...]
    """(place, records already done) for each reader, in the order in which it reads."""
    shared: bool
    """True if there is one list that every rank reads, taking its share of every global batch."""

    def position(self, cursors: Mapping[int, Cursor]) -> StreamPosition:
        """Return the position for the readers' ``cursors``. A reader without a cursor has done
        nothing.
        """
        done, begun = set(self.base.done), dict(self.base.begun)
        for reader, (index, records) in cursors.items():
            places = self.lists[reader]
            for place, _ in places[:index]:
                done.add(place)
                begun.pop(place, None)
            if index < len(places) and records:
                begun[places[index][0]] = records
        return StreamPosition(self.base.shards, frozenset(done), begun)


def deal(position: StreamPosition, world_size: int, readers: int, shared: bool = False) -> Deal:
    """Deal out the remaining shards evenly to ``world_size * readers`` readers. With fewer shards
    than readers, or with ``shared``, every rank reads all shards.

    Args:
        position: current position in the epoch.
        world_size: number of ranks.
        readers: number of readers of each rank.
        shared: let every rank read all shards.

    Returns:
        The lists of the readers. Reader ``r`` of rank ``k`` has the list ``r * world_size + k``.
    """
    remaining = [(place, position.begun.get(place, 0)) for place in position.remaining()]
    reader_count = world_size * readers
    if shared or len(remaining) < reader_count:
        return Deal(position, (tuple(remaining),), True)
    return Deal(
        position,
        tuple(tuple(remaining[reader::reader_count]) for reader in range(reader_count)),
        False,
    )
