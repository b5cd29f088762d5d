"""A global sample order that survives rescales: every sample of an epoch exactly once, whatever the
world sizes were.

Decides which samples form each global batch and which of them this rank trains on. The position is
a number of samples of the epoch, the same on every rank and at every world size; it does not decide
when the position is saved (:mod:`malletrain.training.snapshot` does).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from malletrain.protocol import env
from malletrain.training.report import tell

_STATE_VERSION = 1


class ElasticSampler:
    """A batch sampler for ``DataLoader(dataset, batch_sampler=sampler)``: yields this rank's share
    of each global batch.

    The order of an epoch is one permutation of ``range(num_samples)`` drawn from (seed, epoch); a
    global batch is the next piece of it, cut into contiguous shares whose sizes differ by at most
    one. Workers that fetch ahead are fine, because taking a batch from the loader moves nothing:
    :meth:`advance`, called at the end of each step, does.

    Args:
        num_samples: length of the dataset.
        global_batch_size: samples per step over all ranks, the same at any world size (the training
            trajectory does not depend on the scale). Exactly one of this and ``batch_size``.
        batch_size: samples per step and rank; the global batch is ``batch_size * world_size`` and
            changes with the scale.
        seed: of the permutations.
        shuffle: False takes the samples in order.
        rank, world_size: from torch.distributed when it is initialised, else from RANK and
            WORLD_SIZE, else 0 and 1.
        max_world_size: the largest number of ranks the job will ever have; from
            MALLETRAIN_MAX_WORLD_SIZE, else the world size.
        drop_last: drop a remainder smaller than a global batch instead of training on it.

    The tail: a remainder smaller than ``max_world_size`` could leave a rank without a sample, and
    collectives would hang. It is therefore taken into the batch before, which grows by up to
    ``max_world_size - 1`` samples (over all ranks). At every step boundary the number of samples
    left is 0 or at least ``max_world_size``.

    Raises:
        ValueError: when the sizes do not fit each other; the message says which.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        max_world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        here_rank, here_world = rank_and_world()
        self.rank = here_rank if rank is None else rank
        self.world_size = here_world if world_size is None else world_size
        if max_world_size is None:
            max_world_size = max(_env_max_world(), self.world_size)
        self.max_world_size = max_world_size
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self._check(global_batch_size, batch_size)
        self._per_rank = batch_size
        self.global_batch_size = global_batch_size or (batch_size or 0) * self.world_size
        self.epoch = 0
        self.position = 0
        self._handed_out = (0, 0)
        self._advances = 0
        self._ended = False
        self._order: tuple[tuple[int, int, bool], Any] | None = None

    def _check(self, global_batch_size: int | None, batch_size: int | None) -> None:
        if (global_batch_size is None) == (batch_size is None):
            raise ValueError(
                "ElasticSampler needs exactly one of global_batch_size (over all ranks) and "
                "batch_size (per rank)."
            )
        given = {
            "num_samples": self.num_samples,
            "global_batch_size": global_batch_size,
            "batch_size": batch_size,
            "world_size": self.world_size,
            "max_world_size": self.max_world_size,
        }
        for name, value in given.items():
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise ValueError(
                    f"ElasticSampler: {name} must be a whole number from 1, not {value!r}."
                )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"ElasticSampler: rank {self.rank} is not one of the {self.world_size} ranks "
                f"0..{self.world_size - 1}."
            )
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
        if global_batch_size is not None and global_batch_size < self.max_world_size:
            raise ValueError(
                f"ElasticSampler: a global batch of {global_batch_size} samples cannot be "
                f"shared by the {self.max_world_size} ranks the "
                "job may have. Raise global_batch_size or submit the job with fewer nodes at most."
            )
        largest = global_batch_size or (batch_size or 0) * self.max_world_size
        if self.drop_last and self.num_samples < largest:
            raise ValueError(
                f"ElasticSampler: with drop_last an epoch of {self.num_samples} samples has no "
                f"full global batch of {largest} samples. "
                "Use a smaller batch or drop_last=False."
            )

    def resize(self, rank: int, world_size: int) -> None:
        """Go on as ``rank`` of ``world_size``, from the position reached; iterators made before
        must not be used any more.

        With ``batch_size`` the global batch changes with the scale.

        Raises:
            ValueError: when the job has more ranks than the sampler was told it ever would.
        """
        if not 0 <= rank < world_size <= self.max_world_size:
            raise ValueError(
                f"ElasticSampler: rank {rank} of {world_size} does not fit a job of at most "
                f"{self.max_world_size} ranks; give the sampler "
                "the largest number of ranks the job will ever have (max_world_size)."
            )
        if self._per_rank is not None:
            self.global_batch_size = self._per_rank * world_size
        self.rank, self.world_size = rank, world_size
        self._handed_out = (self.epoch, self.position)

    # --- the plan of an epoch ---

    def _batch_at(self, position: int) -> int:
        """Size of the global batch that starts at ``position``; 0 at the end of the epoch."""
        left = self.num_samples - position
        size = self.global_batch_size
        if self.drop_last:
            return size if left >= size else 0
        if (
            left < self.world_size
        ):  # only after a state written with a smaller max_world_size: no batch can be made of it
            return 0
        return left if left - size < self.max_world_size else size

    def _share(self, batch: int) -> tuple[int, int]:
        """(start, size) of this rank's share of a global batch of ``batch`` samples."""
        base, extra = divmod(batch, self.world_size)
        return self.rank * base + min(self.rank, extra), base + (self.rank < extra)

    def _steps_from(self, position: int) -> int:
        left = self.num_samples - position
        steps = max(
            0, (left - self.max_world_size) // self.global_batch_size - 1
        )  # full batches for sure; then batch by batch
        position += steps * self.global_batch_size
        while size := self._batch_at(position):
            position += size
            steps += 1
        return steps

    def _permutation(self, epoch: int) -> Any:
        """The order of an epoch: something whose slices have ``tolist()``, or a range."""
        if not self.shuffle:
            return range(self.num_samples)
        key = (self.seed, epoch, self.shuffle)
        if self._order is None or self._order[0] != key:
            import torch

            generator = torch.Generator().manual_seed(_mix(self.seed, epoch))
            self._order = (key, torch.randperm(self.num_samples, generator=generator))
        return self._order[1]

    # --- what a DataLoader needs ---

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's batches from the position to the end of the epoch, as lists of indices; none
        is ever empty.
        """
        epoch, position = self.epoch, self.position
        order = self._permutation(epoch)
        while batch := self._batch_at(position):
            start, size = self._share(batch)
            piece = order[position + start : position + start + size]
            position += batch
            self._handed_out = max(self._handed_out, (epoch, position))
            yield list(piece) if isinstance(piece, range) else piece.tolist()

    def __len__(self) -> int:
        """Steps left in this epoch, at this world size. For a whole epoch see
        :attr:`steps_per_epoch`.
        """
        return self._steps_from(self.position)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch at this world size. With ``batch_size`` it changes with the
        scale.
        """
        return self._steps_from(0)

    # --- what the training loop needs ---

    def epochs(self, count: int) -> Iterator[int]:
        """``for epoch in sampler.epochs(10)``: the epochs not finished yet of 10, starting with the
        one the restored position is in.

        Leaving the inner loop early goes on with the next epoch, as in any script.

        Raises:
            RuntimeError: when an epoch ends without its steps having been counted by
                :meth:`advance`.
        """
        while self.epoch < count and not self._ended:
            epoch, advances = self.epoch, self._advances
            yield epoch
            if self._ended:
                return
            if self.epoch != epoch:
                continue
            if self._advances == advances:
                raise RuntimeError(
                    f"Epoch {epoch} ended without a single call of sampler.advance(), so that "
                    "no snapshot knows how far it came. "
                    "Call sampler.advance() at the end of each training step, on every rank."
                )
            tell(
                f"Epoch {epoch} was left after {self.position} of {self.num_samples} samples, "
                "as sampler.advance() counted them. If the "
                "loop did not end early on purpose, call advance() once for each batch "
                "(advance(batches=k) after k of them).",
                once="epoch left",
            )
            self.set_position(epoch + 1, 0)

    def end(self) -> None:
        """End :meth:`epochs` when the loop asks for the next one; the position stays where it
        is.
        """
        self._ended = True

    def advance(self, batches: int = 1) -> None:
        """A step is done: move the position past its global batch. Call it on every rank at the end
        of each step, before the snapshot.

        Args:
            batches: how many batches the step took from the loader (more than 1 with gradient
                accumulation).

        At the end of the epoch the position becomes the start of the next one.

        Raises:
            RuntimeError: when more batches are reported done than were taken from the loader.
        """
        for _ in range(batches):
            after = self.position + self._batch_at(self.position)
            if (self.epoch, after) > self._handed_out:
                raise RuntimeError(
                    "sampler.advance() was called more often than batches were taken from the "
                    f"loader (epoch {self.epoch}, "
                    f"sample {self.position}). Call it once per batch, and pass the sampler to "
                    "the DataLoader as batch_sampler."
                )
            self.position = after
            self._advances += 1
            self._roll_over()

    def _roll_over(self) -> None:
        if not self._batch_at(self.position):
            lost = self.num_samples - self.position
            if lost and not self.drop_last:
                tell(
                    f"The last {lost} samples of epoch {self.epoch} are left out: this snapshot "
                    "was written when the job could have at "
                    f"most fewer ranks, and {self.world_size} ranks cannot share {lost} samples."
                )
            self.epoch, self.position = self.epoch + 1, 0

    def upcoming(self, batches: int) -> list[tuple[int, int]]:
        """(this rank's samples, samples of the global batch) of up to ``batches`` next batches of
        this epoch.
        """
        found: list[tuple[int, int]] = []
        position = self.position
        while len(found) < batches and (batch := self._batch_at(position)):
            found.append((self._share(batch)[1], batch))
            position += batch
        return found

    @property
    def loss_weight(self) -> float:
        """(this rank's samples) · (ranks) / (samples of the global batch) for the step in progress
        (before :meth:`advance`).

        DDP averages the ranks' gradients with equal weight. Multiplying a mean loss by this number
        makes the result the exact mean over the global batch when the shares are uneven; it is 1.0
        when they are even.
        """
        batch = self._batch_at(self.position)
        return self._share(batch)[1] * self.world_size / batch if batch else 1.0

    # --- what a snapshot needs ---

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every rank: plain numbers."""
        return {
            "version": _STATE_VERSION,
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_samples": self.num_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, whatever the world size and the batch size were when it was written.
        The state's seed wins.

        Raises:
            ValueError: when the state belongs to a dataset of another length or another version, or
                is damaged.
        """
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"A sampler state of version {state.get('version')!r}; this malletrain reads "
                f"version {_STATE_VERSION}."
            )
        if state.get("num_samples") != self.num_samples:
            raise ValueError(
                f"The sampler's state was written for a dataset of {state.get('num_samples')} "
                "samples, but this one has "
                f"{self.num_samples}. Train with the same data, or start anew with another "
                "snapshot path."
            )
        seed, shuffle = int(state["seed"]), bool(state["shuffle"])
        if (seed, shuffle) != (self.seed, self.shuffle):
            tell(
                f"The sample order goes on as the snapshot began it (seed {seed}, shuffle "
                f"{shuffle}); the script's "
                f"(seed {self.seed}, shuffle {self.shuffle}) would repeat samples."
            )
        self.seed, self.shuffle = seed, shuffle
        self.set_position(int(state["epoch"]), int(state["position"]))

    def set_position(self, epoch: int, position: int) -> None:
        """Go on at a sample of an epoch; iterators made before keep yielding from where they were.

        Raises:
            ValueError: when there is no such position.
        """
        if epoch < 0 or not 0 <= position <= self.num_samples:
            raise ValueError(
                f"ElasticSampler: there is no sample {position} of {self.num_samples} in epoch "
                f"{epoch}."
            )
        self.epoch, self.position = epoch, position
        self._handed_out = (epoch, position)
        self._roll_over()


def rank_and_world() -> tuple[int, int]:
    """(rank, world size) from torch.distributed when it is initialised, else from the environment
    torchrun sets, else (0, 1).
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


def _env_max_world() -> int:
    try:
        return int(os.environ.get(env.MAX_WORLD_SIZE, "1"))
    except ValueError:
        return 1


def _mix(seed: int, epoch: int) -> int:
    """One 32-bit seed from two numbers (splitmix64): torch's CPU generator looks at the lower 32
    bits only.
    """
    value = (seed * 0x9E3779B97F4A7C15 + epoch + 1) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> shift)) * factor % 2**64
    return (value ^ (value >> 31)) % 2**32
