"""A global sample order that survives rescales: every sample of an epoch exactly once, whatever the
world sizes were.

Tracks the position of the training in that order, and yields this rank's batches from there. The
position is a number of samples of the epoch, the same on every rank and at every world size.
:mod:`malletrain.training.epoch_plan` decides which samples form a batch, and
:mod:`malletrain.training.snapshot` when the position is saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from malletrain.training import loader_workers
from malletrain.training.batch_change import check_same_size
from malletrain.training.epoch_plan import (
    EpochPlan,
    UpcomingBatch,
    order,
    upcoming_batches,
    whole_number,
)
from malletrain.training.epochs import CountedEpochs
from malletrain.training.ranks import max_world, rank_and_world
from malletrain.training.report import tell, tell_batch
from malletrain.training.sampler_loaders import (
    LoaderSeeds,
    SubsetCheck,
    call_around_batches,
    calling_loader,
    calling_object,
    is_loader_iterator,
    reject_wrapper,
)

_STATE_VERSION = 1


class ElasticSampler(CountedEpochs):
    """A batch sampler for ``DataLoader(dataset, batch_sampler=sampler)``: yields this rank's share
    of each global batch.

    The order of an epoch is one permutation of ``range(num_samples)`` drawn from (seed, epoch); a
    global batch is the next piece of it, cut into contiguous shares whose sizes differ by at most
    one. Loader workers can prefetch, because reading a batch does not change the position.
    :meth:`advance`, called at the end of each step, changes it.

    Args:
        num_samples: length of the dataset.
        global_batch_size: samples per step over all ranks, the same at any world size (the training
            trajectory does not depend on the scale). Exactly one of this and ``batch_size``.
            :meth:`set_global_batch_size` changes it.
        batch_size: samples per step and rank; the global batch is ``batch_size * world_size`` and
            changes with the scale.
        seed: seed of the permutations.
        shuffle: False yields the samples in order.
        rank, world_size: rank of this process and number of ranks. Default: from torch.distributed
            if it is initialised, else from RANK and WORLD_SIZE, else 0 and 1.
        max_world_size: maximum number of ranks of the job. Default: MALLETRAIN_MAX_WORLD_SIZE, else
            ``world_size``.
        drop_last: drop a remainder smaller than a global batch instead of training on it.

    If fewer than ``max_world_size`` samples remain at the end of an epoch, the last batch includes
    them (:class:`malletrain.training.epoch_plan.EpochPlan` explains why).

    Raises:
        ValueError: the sizes are inconsistent; the message names them.
    """

    _name, _element_noun = "sampler", "sample"

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
        default_rank, default_world_size = rank_and_world()
        self.rank = default_rank if rank is None else rank
        self.world_size = default_world_size if world_size is None else world_size
        if max_world_size is None:
            max_world_size = max_world(self.world_size, global_batch_size)
        self.max_world_size = max_world_size
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self._batch_size_per_rank = batch_size
        self._plan = self._make_plan(global_batch_size, batch_size)
        self._script_size = global_batch_size
        """The script's ``global_batch_size``."""
        self._next_size: int | None = None
        """Global batch size that is requested and has not taken effect; None for none."""
        self._size_checks: list[Callable[[int], None]] = []
        self._has_batches: Callable[[], bool] | None = None
        """Whether the loop has batches that it has not trained on; None in restart mode."""
        self._iteration_trains = False
        """This iteration began before the steps of an epoch were done."""
        self.epoch = 0
        self.position = 0
        self._read_up_to = (0, 0)
        self._loader_iterator: weakref.ref[Any] | None = None
        """The DataLoader iterator that reads from this sampler."""
        self._loader_seeds = LoaderSeeds()
        self._subset = SubsetCheck()
        self._batches_yielded = self._advances_at_start = 0
        """Batches yielded in this iteration, and number of advance() calls before it."""
        self._iteration_start = (0, 0)
        """Epoch and position at which this iteration began."""
        super().__init__()
        tell_batch(self.rank, global_batch_size, global_batch_size)
        loader_workers.install()
        self._orders: dict[tuple[int, int], Any] = {}
        """Orders of the two epochs that were used last, by (seed, epoch)."""

    def __getstate__(self) -> dict[str, Any]:
        own: dict[str, Any] = {"_loader_iterator": None, "_has_batches": None, "_size_checks": []}
        return {**super().__getstate__(), **own, "_loader_seeds": LoaderSeeds()}

    def _make_plan(self, global_batch_size: int | None, batch_size: int | None) -> EpochPlan:
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
        if batch_size is None:
            plan.check_smallest()
        plan.check_largest(global_batch_size or (batch_size or 0) * self.max_world_size)
        return plan

    @property
    def global_batch_size(self) -> int:
        """Number of samples of a full step over all ranks, at this world size."""
        return self._plan.global_batch_size

    def set_global_batch_size(self, size: int) -> None:
        """Change the number of samples per step over all ranks. Call it on every rank with the same
        size; under torch.distributed it is collective in restart mode.

        The change takes effect when no batch of the old size is left: at once before the first
        batch of an epoch is read, else when the next epoch begins. In live mode it takes effect at
        the next step, and batches that the loader has read ahead are drawn again in the new size;
        with ``drop_last`` it takes effect when the next epoch begins there, too. The size is part
        of the state from then on, and replaces the script's where a run resumes.

        Args:
            size: samples per step over all ranks, at least ``max_world_size``.

        Raises:
            ValueError: the sampler has a ``batch_size`` per rank, the ranks name different sizes,
                the job may have more ranks than ``size`` samples, with ``drop_last`` the dataset
                has fewer, or a batch normalisation would get portions of one sample.
        """
        if self._has_batches is None:
            check_same_size(size, self.world_size)
        self.check_global_batch_size(size)
        self._next_size = size
        if self._has_batches is not None:
            apply = not self._has_batches() and (not self.position or not self.drop_last)
        else:
            apply = not self.position and not self._has_read_epoch()
        if apply:
            self._apply_next_size()

    def check_global_batch_size(self, size: int) -> None:
        """Check that :meth:`set_global_batch_size` accepts ``size``, and change nothing.

        Raises:
            ValueError: it does not. That the ranks name the same size is not checked.
        """
        self._check_size(size)
        for check in self._size_checks:
            check(size // self.max_world_size)

    def check_sizes(self, check: Callable[[int], None]) -> None:
        """Call ``check`` before each change of the global batch size, with the samples of the
        smallest portion at ``max_world_size`` ranks. It raises ValueError to refuse the change.
        """
        self._size_checks.append(check)

    def change_size_at_steps(self, has_batches: Callable[[], bool]) -> None:
        """Let :meth:`set_global_batch_size` take effect between two steps, without a collective.

        Args:
            has_batches: returns whether the loop has batches that it has not trained on. The
                batches that a loader has read ahead beyond these are discarded by the caller.
        """
        self._has_batches = has_batches

    @property
    def script_batch_size(self) -> int | None:
        """The ``global_batch_size`` with which the script created the sampler; None with a
        ``batch_size`` per rank.
        """
        return self._script_size

    @property
    def requested_batch_size(self) -> int | None:
        """The newest size of :meth:`set_global_batch_size`, which may not have taken effect yet;
        None with a ``batch_size`` per rank.
        """
        if self._batch_size_per_rank is not None:
            return None
        return self._next_size or self.global_batch_size

    def withdraw_size_request(self, size: int | None) -> None:
        """Request ``size`` again instead of the newest size, because the step is discarded in which
        the script requested that one. ``size``: :attr:`requested_batch_size` before the step.
        """
        self._next_size = None if size == self.global_batch_size else size

    def _check_size(self, size: object) -> None:
        if self._batch_size_per_rank is not None:
            raise ValueError(
                "ElasticSampler: set_global_batch_size() changes the batch of all ranks, but this "
                "sampler has batch_size (per rank). Create it with global_batch_size."
            )
        whole_number("the size of set_global_batch_size()", size)
        assert isinstance(size, int)
        plan = replace(self._plan, global_batch_size=size)
        plan.check_smallest()
        plan.check_largest(size)

    def _has_read_epoch(self) -> bool:
        """Whether the iteration in progress has read batches of the epoch that is about to begin,
        to train on them.
        """
        loader = self._loader_iterator
        return (
            self._iteration_trains
            and self._batches_yielded > 0
            and self._iteration_start == (self.epoch, 0)
            and (loader is None or loader() is not None)
        )

    def _apply_next_size(self) -> None:
        size, self._next_size = self._next_size, None
        if size is None or size == self.global_batch_size:
            return
        self._plan = replace(self._plan, global_batch_size=size)
        self._read_up_to = (self.epoch, self.position)
        tell_batch(self.rank, size, self._script_size)

    def resize(self, rank: int, world_size: int) -> None:
        """Continue as ``rank`` of ``world_size`` from the current position. Do not use iterators
        that were created before.

        With ``batch_size`` the global batch changes with the scale.

        Args:
            rank: rank of this process in the new round.
            world_size: number of ranks of the new round, at most ``max_world_size``.

        Raises:
            ValueError: ``rank`` is not in ``0..world_size - 1``, or ``world_size`` exceeds
                ``max_world_size``.
        """
        if not 0 <= rank < world_size <= self.max_world_size:
            raise ValueError(
                f"ElasticSampler: rank {rank} of {world_size} does not fit a job of at most "
                f"{self.max_world_size} ranks; give the sampler the largest number of ranks the "
                "job will ever have (max_world_size)."
            )
        batch = self.global_batch_size
        if self._batch_size_per_rank is not None:
            batch = self._batch_size_per_rank * world_size
        self.rank, self.world_size = rank, world_size
        self._plan = replace(self._plan, global_batch_size=batch, world_size=world_size)
        self._read_up_to = (self.epoch, self.position)

    # --- what a DataLoader needs ---

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches from the position to the end of the epoch, as lists of sample
        indices. No batch is empty.
        """
        caller, loader = calling_object(), calling_loader()
        reject_wrapper(self, caller)
        if is_loader_iterator(caller) and loader is not None:  # else torchdata's, for its state
            self._subset.read(loader.dataset, self.epoch)
            if not self._advances:
                done = self.epoch * self.num_samples + self.position
                self._loader_seeds.begin(loader.generator, done)
        self._on_iteration()
        self._save_rng_state(caller)
        is_loader = is_loader_iterator(caller)
        self._loader_iterator = weakref.ref(caller, self._on_iterator_freed) if is_loader else None
        calls = (self._request_batch, lambda: self._iteration.ran_out(self._batches_yielded))
        self._begin_requests(is_loader and call_around_batches(caller, *calls))
        self._batches_yielded, self._advances_at_start = 0, self._advances
        self._iteration_trains = not self.between_epochs
        self._iteration_start = (self.epoch, self.position)
        return self._batches()

    def _on_iterator_freed(self, reference: object) -> None:
        if reference is self._loader_iterator:
            self._leave_batches()

    def _save_rng_state(self, caller: object) -> None:
        if not is_loader_iterator(caller) or not self.position:
            self._loader_seeds.forget()
        elif (
            self._loader_iterator is None
            or self._loader_iterator() is not caller
            or self._batches_yielded
        ):
            self._loader_seeds.resume(self.position)
        # else: a loader with workers calls iter() again before its first batch; keep the first
        # state

    def _batches_in_progress(self) -> int:
        """Return the number of batches that the training loop has received and :meth:`advance` has
        not counted. A DataLoader with workers prefetches more than these.
        """
        yielded = self._batches_yielded
        loader_iterator = self._loader_iterator() if self._loader_iterator is not None else None
        if loader_iterator is not None:
            from malletrain.training.torch_private import batches_yielded

            yielded = batches_yielded(loader_iterator, yielded)
        return yielded - (self._advances - self._advances_at_start)

    def _batches(self) -> Iterator[list[int]]:
        epoch, position = self.epoch, self.position
        indices = self._indices(epoch)
        self._loader_seeds.restore()
        plan = self._plan
        while batch := plan.batch_at(position):
            start, size = plan.share(batch, self.rank)
            share = indices[position + start : position + start + size]
            position += batch
            self._batches_yielded += 1
            if plan is self._plan:
                self._read_up_to = max(self._read_up_to, (epoch, position))
            yield list(share) if isinstance(share, range) else share.tolist()

    def _indices(self, epoch: int) -> Any:
        """Return the order of an epoch: a range, or a tensor of sample indices."""
        if not self.shuffle:
            return range(self.num_samples)
        key = (self.seed, epoch)
        indices = self._orders.pop(key, None)
        if indices is None:
            indices = order(self.num_samples, self.seed, epoch)
            if len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
        self._orders[key] = indices  # the last one is the newest
        return indices

    def __len__(self) -> int:
        """Number of batches that a loop receives at this world size, from the position at which it
        starts to the end of the epoch. The number stays the same while a DataLoader is iterated, so
        that ``i + 1 == len(loader)`` holds for the last batch. For a whole epoch see
        :attr:`steps_per_epoch`.
        """
        epoch, position = self._iteration_start
        iterating = (
            self._loader_iterator is not None
            and self._loader_iterator() is not None
            and epoch == self.epoch
        )
        return self._plan.steps_from(position if iterating else self.position)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of a whole epoch at this world size. With ``batch_size`` it changes with
        the scale.
        """
        return self._plan.steps_from(0)

    @property
    def coverage(self) -> float:
        """Part of the samples that an epoch trains on, each of them once: below 1 with
        ``drop_last``.
        """
        dropped = self.num_samples % self.global_batch_size if self.drop_last else 0
        return 1.0 - dropped / self.num_samples

    # --- what the training loop needs ---

    def _samples_left(self, count: int) -> int:
        return max(0, (count - self.epoch) * self._complete_length() - self.position)

    def _constant_batch(self) -> int | None:
        return self._script_size if self._script_size == self.global_batch_size else None

    def _samples_done(self) -> int:
        return self.position

    def _complete_length(self) -> int:
        dropped = self.num_samples % self.global_batch_size if self.drop_last else 0
        return self.num_samples - dropped

    def _left_sentence(self) -> str:
        return (
            f"Epoch {self.epoch} was left after {self.position} of {self.num_samples} samples "
            "(as counted by sampler.advance()). If this is not intended, call advance() once for "
            "each batch, also before a `continue`, or advance(batches=k) after k batches."
        )

    def _begin_next_epoch(self) -> None:
        self.set_position(self.epoch + 1, 0)

    def advance(self, batches: int = 1) -> None:
        """Move the position past the global batch of the finished step. Call it on every rank at
        the end of each step, before ``Snapshot.step()``.

        Args:
            batches: number of batches that the step took from the loader (more than 1 with gradient
                accumulation).

        At the end of the epoch the position becomes the start of the next one, and
        :attr:`between_epochs` is true until the loop requests the next epoch.

        Raises:
            RuntimeError: ``batches`` exceeds the number of batches that the loader has yielded and
                that are not counted yet.
        """
        for _ in range(batches):
            next_position = self.position + self._plan.batch_at(self.position)
            if (self.epoch, next_position) > self._read_up_to:
                raise RuntimeError(
                    "sampler.advance() was called more often than batches were taken from the "
                    f"loader (epoch {self.epoch}, sample {self.position}). Call it once per batch, "
                    "and pass the sampler to the DataLoader as batch_sampler."
                )
            self.position = next_position
            self._count_batch()
            self.between_epochs = self._roll_over()
        if self._has_batches is not None and not self.drop_last:
            self._apply_next_size()
        if not self.between_epochs:  # at the end of an epoch nothing is prefetched
            self._prefetched = max(0, self._batches_in_progress())

    def _roll_over(self) -> bool:
        """Move to the next epoch if no batch of this one remains. Return whether it moved."""
        over = not self._plan.batch_at(self.position)
        if over:
            skipped_samples = self.num_samples - self.position
            if skipped_samples and not self.drop_last:
                tell(
                    f"The last {skipped_samples} samples of epoch {self.epoch} are left out: "
                    f"{self.world_size} ranks cannot share {skipped_samples} samples. The snapshot "
                    "was written when the job's maximum number of ranks was lower."
                )
            self.epoch, self.position = self.epoch + 1, 0
        if not self.position:
            self._apply_next_size()
        return over

    def upcoming(self, batches: int) -> list[tuple[int, int]]:
        """Return (samples of this rank, samples of the global batch) for each of the next
        ``batches`` batches; fewer at the end of the epoch.
        """
        ranges: list[tuple[int, int]] = []
        position = self.position
        while len(ranges) < batches and (batch := self._plan.batch_at(position)):
            ranges.append((self._plan.share(batch, self.rank)[1], batch))
            position += batch
        return ranges

    def unread_batches(self, count: int) -> list[UpcomingBatch]:
        """Return the next ``count`` batches of this rank that were not requested yet, over the end
        of the epoch into the next one. They follow from the seed, the epoch and the position alone.
        """
        epoch, position = max(self._read_up_to, (self.epoch, self.position))
        return upcoming_batches(self._plan, self._indices, self.rank, epoch, position, count)

    @property
    def loss_weight(self) -> float:
        """Factor for the mean loss of the newest batch: (samples of this rank) · (ranks) / (samples
        of the global batch). Read it before :meth:`advance`.

        DDP averages the ranks' gradients with equal weight. Multiplying a mean loss by this number
        makes the result the exact mean over the global batch when the shares are uneven; it is 1.0
        when they are even. With gradient accumulation read it for each micro-batch: the last
        micro-batch of an epoch may have a different weight.
        """
        _, batch = self._batch_in_progress()
        return self._plan.share(batch, self.rank)[1] * self.world_size / batch if batch else 1.0

    def _batch_in_progress(self) -> tuple[int, int]:
        """Return (position, size) of the global batch that the script trains on now."""
        position = self.position
        for _ in range(self._micro_batch(self._batches_in_progress())):
            position += self._plan.batch_at(position)
        if batch := self._plan.batch_at(position):
            return position, batch
        return self.position, self._plan.batch_at(self.position)

    # --- what a snapshot needs ---

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain numbers and booleans; it is the same on every rank. The
        global batch size is part of it if it is not the script's.
        """
        size = self.requested_batch_size if self.left_early else self.global_batch_size
        sizes = {
            "global_batch_size": None if size == self._script_size else size,
            "next_global_batch_size": None if self.left_early else self._next_size,
        }
        if self._batch_size_per_rank is not None:
            sizes = {}
        return {
            "version": _STATE_VERSION,
            "epoch": self.epoch + self.left_early,
            "position": 0 if self.left_early else self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_samples": self.num_samples,
            **{name: value for name, value in sizes.items() if value is not None},
            **self._subset.state(),
            **self._resumed_epoch.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`. The world size and the script's batch size
        may differ from those at the time it was written. The state's seed replaces the sampler's,
        and so does a global batch size of :meth:`set_global_batch_size`.

        Raises:
            ValueError: the state has another version, belongs to a dataset of another length, or is
                damaged; or the job may have more ranks than its global batch has samples.
        """
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"The sampler's state has version {state.get('version')!r}, but this malletrain "
                f"reads version {_STATE_VERSION}."
            )
        if state.get("num_samples") != self.num_samples:
            raise ValueError(
                f"The sampler's state was written for a dataset of {state.get('num_samples')} "
                f"samples, but this one has {self.num_samples}. Train with the same data, or start "
                "anew with another snapshot path."
            )
        self._keep_order(state)
        self._load_sizes(state)
        self._subset.load(state)
        self.set_position(int(state["epoch"]), int(state["position"]))
        self._resume(state)
        if self._batches_yielded and not self._iteration.requests:
            self._refuse_prefetched(self._iteration_start, (self.epoch, self.position))

    def _load_sizes(self, state: Mapping[str, Any]) -> None:
        if self._script_size is None:
            return  # batch_size per rank
        size = state.get("global_batch_size", self._script_size)
        next_size = state.get("next_global_batch_size")
        for value in (size, next_size or size):
            self._check_size(value)
        self._next_size = size
        self._apply_next_size()
        self._next_size = next_size

    def set_position(self, epoch: int, position: int) -> None:
        """Continue at a sample of an epoch. Iterators that were created before yield from their old
        position.

        Args:
            epoch: number of the epoch, from 0.
            position: number of samples of the epoch that are done, over all ranks.

        Raises:
            ValueError: the epoch is negative, or has no such sample.
        """
        if epoch < 0 or not 0 <= position <= self.num_samples:
            raise ValueError(
                f"ElasticSampler: there is no sample {position} of {self.num_samples} in epoch "
                f"{epoch}. Give an epoch from 0, and a position from 0 to {self.num_samples}."
            )
        self.epoch, self.position = epoch, position
        self._read_up_to = (epoch, position)
        self.left_early = self.between_epochs = False
        self._roll_over()
