"""A global sample order that survives rescales: every sample of an epoch exactly once, whatever the
world sizes were.

Decides how far the training has come in that order, and hands out this rank's batches from there.
The position is a number of samples of the epoch, the same on every rank and at every world size.
Which samples form a batch is :mod:`malletrain.training.epoch_plan`'s, when the position is saved
:mod:`malletrain.training.snapshot`'s.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from malletrain.training.epoch_plan import EpochPlan, order, whole_number
from malletrain.training.epochs import CountedEpochs
from malletrain.training.ranks import max_world, rank_and_world
from malletrain.training.report import tell

_STATE_VERSION = 1


class ElasticSampler(CountedEpochs):
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

    The tail: a remainder smaller than ``max_world_size`` is taken into the batch before
    (:class:`malletrain.training.epoch_plan.EpochPlan` says why).

    Raises:
        ValueError: when the sizes do not fit each other; the message says which.
    """

    _name, _ordered = "sampler", "sample"

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
            max_world_size = max_world(self.world_size)
        self.max_world_size = max_world_size
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self._per_rank = batch_size
        self._plan = self._planned(global_batch_size, batch_size)
        self.epoch = 0
        self.position = 0
        self._handed_out = (0, 0)
        self._reader: weakref.ref[Any] | None = None
        """The iterator of the DataLoader that reads from here."""
        self._random: Any = None
        """State of torch's generator before a DataLoader was begun in the middle of an epoch."""
        self._yielded = self._advances_before = 0
        """Of this iteration: batches read, and calls of advance() when it began."""
        self._began_at = (0, 0)
        """Epoch and position at which this iteration began."""
        super().__init__()
        self._order: tuple[tuple[int, int], Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_reader": None, "_random": None}

    def _planned(self, global_batch_size: int | None, batch_size: int | None) -> EpochPlan:
        if (global_batch_size is None) == (batch_size is None):
            raise ValueError(
                "ElasticSampler needs exactly one of global_batch_size (over all ranks) and "
                "batch_size (per rank)."
            )
        if batch_size is not None:
            whole_number("batch_size", batch_size)
        whole_number("world_size", self.world_size)
        plan = EpochPlan(
            self.num_samples,
            (batch_size or 0) * self.world_size if global_batch_size is None else global_batch_size,
            self.world_size,
            self.max_world_size,
            self.drop_last,
        )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"ElasticSampler: rank {self.rank} is not one of the {self.world_size} ranks "
                f"0..{self.world_size - 1}."
            )
        if plan.global_batch_size < self.max_world_size and batch_size is None:
            raise ValueError(
                f"ElasticSampler: a global batch of {global_batch_size} samples cannot be "
                f"shared by the {self.max_world_size} ranks the "
                "job may have. Raise global_batch_size or submit the job with fewer nodes at most."
            )
        plan.check_largest(global_batch_size or (batch_size or 0) * self.max_world_size)
        return plan

    @property
    def global_batch_size(self) -> int:
        """Samples of a full step over all ranks, at this world size."""
        return self._plan.global_batch_size

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
        batch = self.global_batch_size
        if self._per_rank is not None:
            batch = self._per_rank * world_size
        self.rank, self.world_size = rank, world_size
        self._plan = replace(self._plan, global_batch_size=batch, world_size=world_size)
        self._handed_out = (self.epoch, self.position)

    # --- what a DataLoader needs ---

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's batches from the position to the end of the epoch, as lists of indices; none
        is ever empty.
        """
        caller = _iterating()
        _refuse_wrapping(self, caller)
        self._iterated()
        self._keep_random(caller)
        self._reader = weakref.ref(caller) if _is_loader_iterator(caller) else None
        self._yielded, self._advances_before = 0, self._advances
        self._began_at = (self.epoch, self.position)
        return self._batches()

    def _keep_random(self, caller: object) -> None:
        """A DataLoader draws a number from torch's generator when it is iterated. An undisturbed
        epoch iterates it once; going on in the middle of one must not draw again.
        """
        if not _is_loader_iterator(caller) or not self.position:
            self._random = None
        elif self._reader is None or self._reader() is not caller or self._yielded:
            import torch

            self._random = torch.get_rng_state()
        # else the same one asks again before its first batch, as those with workers do

    def _not_done(self) -> int:
        """Batches that the script's loop took and that no :meth:`advance` has counted. A DataLoader
        with workers reads further than that.
        """
        taken, reader = self._yielded, self._reader() if self._reader is not None else None
        if reader is not None:
            from malletrain.training.torch_private import batches_yielded

            taken = batches_yielded(reader, taken)
        return taken - (self._advances - self._advances_before)

    def _batches(self) -> Iterator[list[int]]:
        epoch, position = self.epoch, self.position
        indices = self._indices(epoch)
        if self._random is not None:
            import torch

            torch.set_rng_state(self._random)
            self._random = None
        while batch := self._plan.batch_at(position):
            start, size = self._plan.share(batch, self.rank)
            share = indices[position + start : position + start + size]
            position += batch
            self._yielded += 1
            self._handed_out = max(self._handed_out, (epoch, position))
            yield list(share) if isinstance(share, range) else share.tolist()

    def _indices(self, epoch: int) -> Any:
        """The order of an epoch: something whose slices have ``tolist()``, or a range."""
        if not self.shuffle:
            return range(self.num_samples)
        if self._order is None or self._order[0] != (self.seed, epoch):
            self._order = ((self.seed, epoch), order(self.num_samples, self.seed, epoch))
        return self._order[1]

    def __len__(self) -> int:
        """Batches that a loop over the epoch gets, at this world size: all that are left when it
        begins. It stays while a DataLoader is iterated, so that ``i + 1 == len(loader)`` holds for
        the last batch. For a whole epoch see :attr:`steps_per_epoch`.
        """
        epoch, position = self._began_at
        within = self._reader is not None and self._reader() is not None and epoch == self.epoch
        return self._plan.steps_from(position if within else self.position)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch at this world size. With ``batch_size`` it changes with the
        scale.
        """
        return self._plan.steps_from(0)

    # --- what the training loop needs ---

    def _samples_left(self, count: int) -> int:
        batch = self.global_batch_size
        epoch = self.num_samples - (self.num_samples % batch if self.drop_last else 0)
        return max(0, (count - self.epoch) * epoch - self.position)

    def _is_begun(self) -> bool:
        return self.position > 0

    def _leave_epoch(self) -> None:
        tell(
            f"Epoch {self.epoch} was left after {self.position} of {self.num_samples} samples, "
            "as sampler.advance() counted them. If the "
            "loop did not end early on purpose, call advance() once for each batch "
            "(advance(batches=k) after k of them). If it did, have it end before it trains on a "
            "batch (if sampler.position >= limit: break, as the loop's first line): a change of "
            "nodes between the last step and a break behind it goes on with the epoch.",
            once="epoch left",
        )
        self.set_position(self.epoch + 1, 0)

    def advance(self, batches: int = 1) -> None:
        """A step is done: move the position past its global batch. Call it on every rank at the end
        of each step, before the snapshot.

        Args:
            batches: how many batches the step took from the loader (more than 1 with gradient
                accumulation).

        At the end of the epoch the position becomes the start of the next one, and
        :attr:`between_epochs` is true until the loop asks for it.

        Raises:
            RuntimeError: when more batches are reported done than were taken from the loader.
        """
        for _ in range(batches):
            after = self.position + self._plan.batch_at(self.position)
            if (self.epoch, after) > self._handed_out:
                raise RuntimeError(
                    "sampler.advance() was called more often than batches were taken from the "
                    f"loader (epoch {self.epoch}, "
                    f"sample {self.position}). Call it once per batch, and pass the sampler to "
                    "the DataLoader as batch_sampler."
                )
            self.position = after
            self._advances += 1
            self.between_epochs = self._roll_over()
        if not self.between_epochs:  # at the end nothing is left to be ahead with
            self._ahead = max(0, self._not_done())

    def _roll_over(self) -> bool:
        """Go to the next epoch where nothing of this one is left. Returns whether that was so."""
        over = not self._plan.batch_at(self.position)
        if over:
            lost = self.num_samples - self.position
            if lost and not self.drop_last:
                tell(
                    f"The last {lost} samples of epoch {self.epoch} are left out: this snapshot "
                    "was written when the job could have at "
                    f"most fewer ranks, and {self.world_size} ranks cannot share {lost} samples."
                )
            self.epoch, self.position = self.epoch + 1, 0
        return over

    def upcoming(self, batches: int) -> list[tuple[int, int]]:
        """(this rank's samples, samples of the global batch) of up to ``batches`` next batches of
        this epoch.
        """
        ranges: list[tuple[int, int]] = []
        position = self.position
        while len(ranges) < batches and (batch := self._plan.batch_at(position)):
            ranges.append((self._plan.share(batch, self.rank)[1], batch))
            position += batch
        return ranges

    @property
    def loss_weight(self) -> float:
        """(this rank's samples) · (ranks) / (samples of the global batch) for the batch that the
        loop took last (before :meth:`advance`).

        DDP averages the ranks' gradients with equal weight. Multiplying a mean loss by this number
        makes the result the exact mean over the global batch when the shares are uneven; it is 1.0
        when they are even. With gradient accumulation read it for each micro-batch: the last one of
        an epoch may have another.
        """
        position = self.position
        for _ in range(self._micro_batch(self._not_done())):
            position += self._plan.batch_at(position)
        batch = self._plan.batch_at(position) or self._plan.batch_at(self.position)
        return self._plan.share(batch, self.rank)[1] * self.world_size / batch if batch else 1.0

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
        self._keep_order(state)
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
        self.between_epochs = False
        self._roll_over()


def _iterating() -> Any:
    """The object whose method has asked the caller for its iterator; None outside of methods."""
    frame = inspect.currentframe()
    try:
        for _ in range(2):
            frame = frame.f_back if frame else None
        return frame.f_locals.get("self") if frame else None
    finally:
        del frame  # it would hold itself, and the loader's iterator with its workers


def _is_loader_iterator(caller: object) -> bool:
    """Whether ``caller`` is the iterator of a DataLoader, without importing torch."""
    return any(cls.__name__ == "_BaseDataLoaderIter" for cls in type(caller).__mro__)


def _refuse_wrapping(sampler: ElasticSampler, caller: object) -> None:
    """Raises TypeError when ``caller`` would take the batches for something else: torch's
    BatchSampler for single samples, accelerate's shards for batches of all ranks, and its skipping
    for those of a whole epoch.
    """
    names = {cls.__name__ for cls in type(caller).__mro__}
    if "SkipBatchSampler" in names and getattr(caller, "skip_batches", None) != 0:
        raise TypeError(
            "ElasticSampler begins at the first sample that was not trained on, and "
            "skip_first_batches() would leave out as many once more. Use the loader as it is."
        )
    if "BatchSamplerShard" in names:
        raise TypeError(
            "ElasticSampler hands out this rank's share already, and accelerator.prepare(loader) "
            "would share it out once more. Use the loader as it is: leave it out of prepare()."
        )
    if "BatchSampler" in names and getattr(caller, "sampler", None) is sampler:
        raise TypeError(
            "ElasticSampler yields whole batches, but the DataLoader was given it as sampler=. "
            "Write DataLoader(dataset, batch_sampler=sampler), without batch_size, shuffle and "
            "drop_last."
        )
