"""Iterable datasets made of shards, for jobs whose number of ranks changes: every record of an
epoch exactly once.

Yields this rank's batches and tracks the position of all ranks.
:mod:`malletrain.training.stream_deal` decides which rank reads which shard,
:mod:`malletrain.training.stream_loader` how shards are read, and
:mod:`malletrain.training.snapshot` when the position is saved.

The length of a shard is unknown until it is read. The shards are dealt out to the readers of all
ranks. All steps have the same global batch, so a step is possible only if every rank has its share.
The ranks report to each other at each step whether they have a further share. When a rank has none,
the remaining shards are dealt out again. When too few shards are left for that, all ranks read all
of them and take their share of every global batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from malletrain.training.epoch_plan import order, piece, whole_number
from malletrain.training.epochs import CountedEpochs
from malletrain.training.ranks import max_world, rank_and_world
from malletrain.training.report import tell
from malletrain.training.side_group import new_side_group
from malletrain.training.stream_deal import Cursor, Deal, StreamPosition, deal
from malletrain.training.stream_words import StepWord, send_progress

if TYPE_CHECKING:
    from malletrain.training.stream_loader import Cut, Portion

_STATE_VERSION = 1


class _StepInProgress:
    """A step whose batch was yielded and that :meth:`ElasticStream.advance` has not counted."""

    def __init__(
        self,
        dealt: Deal,
        previous: _StepInProgress | None,
        portion: Portion,
        total: int,
        message: StepWord | None = None,
    ) -> None:
        self.deal, self.share, self.total = dealt, portion.share, total
        self._before = previous
        self._own = {0: (portion.place, portion.records)}
        self._word = message
        self._after: dict[int, Cursor] | None = None

    def cursors(self) -> dict[int, Cursor]:
        """Return the cursors of all readers after this step."""
        if self._after is None:
            previous = self._before.cursors() if self._before else {}
            own = self._word.cursors() if self._word else self._own
            self._after, self._before = {**previous, **own}, None
        return self._after


class ElasticStream(CountedEpochs):
    """The batches of this rank from a dataset made of shards; iterate it as a ``DataLoader``.

    Args:
        shards: shards of the dataset, the same on every rank: paths, URLs or numbers.
        read: function from a shard to its records, always in the same order. If it has a parameter
            ``start``, it is called with the number of the first record to return; else the records
            before that one are read and dropped.
        global_batch_size: records per step over all ranks. Exactly one of this and ``batch_size``.
        batch_size: records per step and rank; the global batch changes with the scale.
        decode: function from a record to a sample; called for this rank's records only. Put costly
            work here and not into ``read``.
        collate_fn: function from a list of samples to a batch. Default: torch's.
        seed: seed of the order of the shards in each epoch.
        shuffle: False reads the shards in order. Records keep their order within a shard.
        num_workers: number of reading processes of this rank, the same on every rank.
        rank, world_size: rank of this process and number of ranks. Default: from torch.distributed
            if it is initialised, else from RANK and WORLD_SIZE, else 0 and 1.
        max_world_size: maximum number of ranks of the job. Default: MALLETRAIN_MAX_WORLD_SIZE, else
            ``world_size``.
        group: CPU process group for the ranks' messages. Default: a new gloo group.
        loader: other options of ``DataLoader``, such as ``pin_memory`` and ``prefetch_factor``.

    Raises:
        ValueError: the sizes are inconsistent; the message names them.
    """

    _name, _element_noun = "stream", "shard"

    def __init__(
        self,
        shards: Sequence[Any],
        read: Callable[..., Iterable[Any]],
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        decode: Callable[[Any], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        max_world_size: int | None = None,
        group: Any = None,
        **loader: Any,
    ) -> None:
        default_rank, default_world_size = rank_and_world()
        self.rank = default_rank if rank is None else rank
        self.world_size = default_world_size if world_size is None else world_size
        self.max_world_size = max_world_size or max_world(self.world_size)
        if (global_batch_size is None) == (batch_size is None):
            raise ValueError(
                "ElasticStream needs exactly one of global_batch_size (over all ranks) and "
                "batch_size (per rank)."
            )
        size = global_batch_size if batch_size is None else batch_size * self.world_size
        whole_number("the batch size", size, "ElasticStream")
        assert size is not None
        self.global_batch_size = size
        if not len(shards):
            raise ValueError("ElasticStream: there are no shards to read.")
        if size < (self.max_world_size if batch_size is None else self.world_size):
            raise ValueError(
                f"ElasticStream: a global batch of {size} records cannot be shared by the "
                f"{self.max_world_size} ranks the job may have. Raise global_batch_size or submit "
                "the job with fewer nodes at most."
            )
        self.shards = shards
        self.seed, self.shuffle = seed, shuffle
        self.num_workers = num_workers
        self._read, self._decode, self._collate = read, decode, collate_fn
        self._options = loader
        self._group = group
        self._in_progress: deque[_StepInProgress] = deque()
        super().__init__()
        self._begin(0)

    def _begin(self, epoch: int, position: StreamPosition | None = None, samples: int = 0) -> None:
        self.epoch = epoch
        self.samples = samples
        """Number of records of this epoch that are done, over all ranks."""
        self._position = position or StreamPosition(len(self.shards))
        self._in_progress.clear()
        self.between_epochs = False

    # --- the batches ---

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches from the position to the end of the epoch."""
        self._on_iteration()
        self._in_progress.clear()
        epoch, position = self.epoch, self._position
        shared = False
        while position.remaining():
            dealt = deal(position, self.world_size, max(1, self.num_workers), shared)
            last: _StepInProgress | None = None
            for step, batch in (
                self._shared_batches(dealt) if dealt.shared else self._dealt_batches(dealt)
            ):
                last = step
                self._in_progress.append(step)
                yield batch
            if dealt.shared:
                break
            shared = last is None  # dealt out, but not enough for a step
            if last is not None:
                position = dealt.position(last.cursors())
        if not self._in_progress and self.epoch == epoch:
            self._drop_remainder()

    def _dealt_batches(self, dealt: Deal) -> Iterator[tuple[_StepInProgress, Any]]:
        from malletrain.training.stream_loader import Cut

        share = piece(self.global_batch_size, self.world_size, self.rank)[1]
        source = self._portions(dealt, dealt.lists[self.rank :: self.world_size], Cut(share))
        group = self._side_group()
        # A step is done only if every rank has a further share after it. So at least one global
        # batch remains at the end, which the ranks can share.
        portion, following = next(source, None), next(source, None)
        message = send_progress(group, following is not None)
        step: _StepInProgress | None = None
        while message.all_have_more():
            assert portion is not None
            next_portion = next(source, None)
            message = send_progress(
                group, next_portion is not None, portion.reader, portion.place, portion.records
            )
            step = _StepInProgress(dealt, step, portion, self.global_batch_size, message)
            yield step, portion.batch
            portion, following = following, next_portion

    def _shared_batches(self, dealt: Deal) -> Iterator[tuple[_StepInProgress, Any]]:
        from malletrain.training.stream_loader import Cut

        cut = Cut(self.global_batch_size, self.rank, self.world_size, self.max_world_size)
        for portion in self._portions(dealt, dealt.lists, cut):
            yield _StepInProgress(dealt, None, portion, portion.total), portion.batch

    def _portions(
        self, dealt: Deal, lists: Sequence[Sequence[tuple[int, int]]], cut: Cut
    ) -> Iterator[Portion]:
        from malletrain.training.stream_loader import Readers, ShardSource, loader

        shards = self._order()
        shards_by_reader = [
            [(self.shards[shards[place]], done) for place, done in part] for part in lists
        ]
        source = ShardSource(self._read, self._decode)
        if self._collate is not None:
            source = replace(source, collate=self._collate)
        workers = min(self.num_workers, len(shards_by_reader))
        return loader(
            Readers(source, shards_by_reader, cut), workers, self._options if workers else {}
        )

    def _order(self) -> Sequence[int]:
        count = len(self.shards)
        if not self.shuffle:
            return range(count)
        shards: list[int] = order(count, self.seed, self.epoch).tolist()
        return shards

    def _side_group(self) -> Any:
        if self._group is None and self.world_size > 1:
            self._group = new_side_group()
            if self._group is None:
                raise RuntimeError(
                    f"ElasticStream: {self.world_size} ranks cannot share a stream without a "
                    "process group. Call torch.distributed.init_process_group() first."
                )
        return self._group

    # --- what the training loop needs ---

    def _is_begun(self) -> bool:
        return self.samples > 0

    def _abandon_epoch(self) -> None:
        tell(f"Epoch {self.epoch} was left after {self.samples} records.", once="epoch left")
        self._begin(self.epoch + 1)

    def advance(self, batches: int = 1) -> None:
        """Move the position past the global batch of the finished step. Call it on every rank at
        the end of each step, before ``Snapshot.step()``.

        Args:
            batches: number of batches that the step took (more than 1 with gradient accumulation).

        Raises:
            RuntimeError: ``batches`` exceeds the number of batches that were yielded and are not
                counted yet.
        """
        for _ in range(batches):
            if not self._in_progress:
                raise RuntimeError(
                    "stream.advance() was called more often than batches were taken from the "
                    "stream. Call it once per batch."
                )
            step = self._in_progress.popleft()
            self._position = step.deal.position(step.cursors())
            self.samples += step.total
            self._advances += 1
            if not self._position.remaining():
                self._begin(self.epoch + 1)
                self.between_epochs = True
        if not self.between_epochs:  # at the end of an epoch nothing is prefetched
            self._prefetched = len(self._in_progress)

    def _drop_remainder(self) -> None:
        """End the epoch: the remaining records are fewer than the ranks."""
        if not self.samples:
            raise ValueError(
                f"ElasticStream: {len(self.shards)} shards have too few records for "
                f"{self.world_size} ranks."
            )
        tell(f"The last records of epoch {self.epoch} are left out: fewer than the ranks.")
        self._advances += 1
        self._begin(self.epoch + 1)
        self.between_epochs = True

    @property
    def loss_weight(self) -> float:
        """Factor for the mean loss of the newest batch: (records of this rank) · (ranks) / (records
        of the global batch). Read it before :meth:`advance`; see
        :attr:`malletrain.ElasticSampler.loss_weight`.
        """
        if not self._in_progress:
            return 1.0
        step = self._in_progress[self._micro_batch(len(self._in_progress))]
        return step.share * self.world_size / step.total

    # --- what a snapshot needs ---

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain numbers, booleans and lists, the same on every rank."""
        return {
            "version": _STATE_VERSION,
            "epoch": self.epoch,
            "samples": self.samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "shards": len(self.shards),
            **self._position.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`. The world size, the batch size and the
        number of workers may differ from those at the time it was written. The state's seed
        replaces the stream's.

        Raises:
            ValueError: the state has another version, or belongs to another number of shards.
        """
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"The stream's state has version {state.get('version')!r}, but this malletrain "
                f"reads version {_STATE_VERSION}."
            )
        if state.get("shards") != len(self.shards):
            raise ValueError(
                f"The stream's state was written for {state.get('shards')} shards, but there are "
                f"{len(self.shards)} now. Train with the same data, or start anew with another "
                "snapshot path."
            )
        self._keep_order(state)
        position = StreamPosition.from_state(len(self.shards), state)
        self._begin(int(state["epoch"]), position, int(state["samples"]))
