"""Iterable datasets made of shards, for jobs whose number of ranks changes: every record of an
epoch exactly once.

:class:`ElasticStream` yields this rank's batches and tracks the position of all ranks.
:mod:`malletrain.training.epoch_plan` decides which rank reads which shard, and
:mod:`malletrain.training.snapshot` when the position is saved.

The length of a shard is unknown until it is read. The shards are dealt out to the readers of all
ranks. All steps have the same global batch, so a step is possible only if every rank has its share.
The ranks report to each other at each step whether they have a further share. When a rank has none,
the remaining shards are dealt out again. When too few shards are left for that, all ranks read all
of them and take their share of every global batch.

:class:`StepWord` is the message of the ranks at each step: whether a rank has a further portion,
and the cursors of its readers. :func:`send_progress` sends it when a batch is yielded, and it is
read when the step is done, so that no rank waits for it.

:class:`Readers` open shards and cut them into portions, in the processes of a ``DataLoader``
(:func:`loader`). :func:`portions` decides how many records a portion has and where the next one
begins.
"""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from malletrain.training.epoch_plan import (
    Cursor,
    Deal,
    StreamPosition,
    deal,
    order,
    piece,
    whole_number,
)
from malletrain.training.epochs import CountedEpochs
from malletrain.training.ranks import max_world, rank_and_world
from malletrain.training.report import tell, tell_batch
from malletrain.training.side_group import new_side_group
from malletrain.training.step_times import waits_counted
from malletrain.training.torch_private import forget_worker

_NUMBERS = 4


class StepWord:
    """The messages of all ranks at one step."""

    def __init__(self, rows: Sequence[Any], work: Any = None) -> None:
        self._rows = rows
        self._work = work

    def _numbers(self) -> list[list[int]]:
        if self._work is not None:
            self._work.wait()
            self._rows, self._work = [row.tolist() for row in self._rows], None
        return list(self._rows)

    def all_have_more(self) -> bool:
        """Return whether every rank has a further portion."""
        return all(more for more, *_ in self._numbers())

    def cursors(self) -> dict[int, Cursor]:
        """Return the cursor of each rank's current reader, by index of its list in the deal."""
        numbers = self._numbers()
        return {
            reader * len(numbers) + rank: (index, records)
            for rank, (_, reader, index, records) in enumerate(numbers)
            if reader >= 0
        }


def send_progress(
    group: Any, more: bool, reader: int = -1, index: int = 0, records: int = 0
) -> StepWord:
    """Send this rank's progress to all ranks of ``group``. Collective, but asynchronous.

    Args:
        group: group of :func:`malletrain.training.side_group.new_side_group`; None for one rank.
        more: whether this rank has a further portion.
        reader: number of the reader of the portion just yielded; -1 for none.
        index: list index in that reader's cursor.
        records: number of records in that reader's cursor.

    Returns:
        The messages of all ranks. Reading them waits for the ranks.
    """
    row = [int(more), reader, index, records]
    if group is None:
        return StepWord([row])
    import torch

    numbers = [torch.empty(_NUMBERS, dtype=torch.int64) for _ in range(group.size())]
    return StepWord(numbers, group.allgather([numbers], [torch.tensor(row)]))


@dataclass(frozen=True)
class ShardSource:
    """Functions that turn shards into batches."""

    read: Callable[..., Iterable[Any]]
    """Function from a shard to its records, always in the same order. With a parameter ``start`` it
    begins at that record itself.
    """
    decode: Callable[[Any], Any] | None = None
    """Function from a record to a sample; called for this rank's records only. None if records are
    samples.
    """
    collate: Callable[[list[Any]], Any] = default_collate
    """Function from a list of samples to a batch."""

    def records(self, shard: Any, start: int) -> Iterator[Any]:
        """Return the records of a shard from number ``start`` on."""
        if start and "start" in inspect.signature(self.read).parameters:
            return iter(self.read(shard, start=start))
        return itertools.islice(iter(self.read(shard)), start, None)

    def batch(self, records: Sequence[Any]) -> Any:
        """Return the batch of ``records``."""
        return self.collate([self.decode(r) if self.decode else r for r in records])


@dataclass(frozen=True)
class Cut:
    """How a reader cuts its records into portions."""

    batch: int
    """Number of records of a portion: this rank's share, or with ``ranks`` above 1 a global
    batch.
    """
    rank: int = 0
    """Rank of this process among ``ranks``."""
    ranks: int = 1
    """Number of ranks that read the same records, of which each takes a share."""
    max_ranks: int = 0
    """With several ranks: a remainder below this number of records joins the portion before it. 0
    if only full portions are used.
    """

    def size(self, available: int) -> int:
        """Return the number of records of the next portion. ``available``: number of records held
        by the reader; below ``batch + ahead`` only at the end of its shards.
        """
        if available >= self.batch + self.ahead or not self.max_ranks:
            return self.batch if available >= self.batch else 0
        return available if available >= self.ranks else 0

    @property
    def ahead(self) -> int:
        """Number of records to hold beyond a portion, to know whether a remainder follows it."""
        return max(1, self.max_ranks)


class Portion(NamedTuple):
    """The batch of a rank in one step."""

    batch: Any
    """Batch, as the source's ``collate`` returned it."""
    share: int
    """Number of records in the batch."""
    total: int
    """Number of records from which the share was cut."""
    reader: int
    """Number of this rank's reader that read it."""
    place: int
    """List index in the reader's cursor after this portion."""
    records: int
    """Number of records in the reader's cursor after this portion."""


def portions(
    source: ShardSource, places: Sequence[tuple[Any, int]], cut: Cut, reader: int = 0
) -> Iterator[Portion]:
    """Cut records into portions.

    Args:
        source: functions that read the shards.
        places: (shard, number of records to skip) of each shard, in reading order.
        cut: sizes of the portions.
        reader: number of this reader.
    """
    portions_: deque[tuple[Any, Cursor]] = deque()
    numbered_records = _numbered(source, places)
    while True:
        missing = cut.batch + cut.ahead - len(portions_)
        portions_.extend(itertools.islice(numbered_records, missing))
        total = cut.size(len(portions_))
        if not total:
            return
        portion_records = [portions_.popleft()[0] for _ in range(total)]
        first, share = piece(total, cut.ranks, cut.rank)
        index, records = portions_[0][1] if portions_ else (len(places), 0)
        batch = source.batch(portion_records[first : first + share])
        yield Portion(batch, share, total, reader, index, records)


def _numbered(
    source: ShardSource, places: Sequence[tuple[Any, int]]
) -> Iterator[tuple[Any, Cursor]]:
    for index, (shard, start) in enumerate(places):
        for number, record in enumerate(source.records(shard, start), start):
            yield record, (index, number)


class Readers(IterableDataset[Portion]):
    """The readers of one rank: one in each process of the loader, or one in this process.

    Args:
        source: reads the shards.
        lists: for each reader, (shard, number of finished records) in the order of reading.
        cut: divides the records into batches.
    """

    def __init__(
        self, source: ShardSource, lists: Sequence[Sequence[tuple[Any, int]]], cut: Cut
    ) -> None:
        self._source, self._lists, self._cut = source, lists, cut

    def __iter__(self) -> Iterator[Portion]:
        worker = get_worker_info()
        reader = worker.id if worker else 0
        if worker:
            forget_worker()
        if reader < len(self._lists):
            yield from portions(self._source, self._lists[reader], self._cut, reader)


def identity(portion: Any) -> Any:
    """Return ``portion``: the collate function of a loader whose portions are batches already."""
    return portion


def loader(readers: Readers, num_workers: int, options: dict[str, Any]) -> Iterator[Portion]:
    """Return the portions of ``readers``, one reader after the other in turn.

    Args:
        readers: readers of this rank.
        num_workers: number of reading processes; 0 reads in this process.
        options: other options of torch's ``DataLoader``.
    """
    portions_: Iterator[Portion] = iter(
        DataLoader(
            readers, batch_size=None, collate_fn=identity, num_workers=num_workers, **options
        )
    )
    return portions_


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
        self.max_world_size = max_world_size or max_world(self.world_size, global_batch_size)
        if (global_batch_size is None) == (batch_size is None):
            raise ValueError(
                "ElasticStream needs exactly one of global_batch_size (over all ranks) and "
                "batch_size (per rank)."
            )
        size = global_batch_size if batch_size is None else batch_size * self.world_size
        whole_number("the batch size", size, "ElasticStream")
        assert size is not None
        self.global_batch_size = size
        self._is_batch_constant = batch_size is None
        if not len(shards):
            raise ValueError("ElasticStream: there are no shards to read.")
        if size < (self.max_world_size if batch_size is None else self.world_size):
            raise ValueError(
                f"ElasticStream: a global batch of {size} records cannot be shared by the "
                f"{self.max_world_size} ranks the job may have. Raise global_batch_size or submit "
                "the job with fewer nodes at most."
            )
        tell_batch(self.rank, global_batch_size, global_batch_size)
        self.shards = shards
        self.seed, self.shuffle = seed, shuffle
        self.num_workers = num_workers
        self._read, self._decode, self._collate = read, decode, collate_fn
        self._options = loader
        self._group = group
        self._in_progress: deque[_StepInProgress] = deque()
        super().__init__()
        self.samples = 0
        self._begin(0)

    def _begin(self, epoch: int, position: StreamPosition | None = None, samples: int = 0) -> None:
        self.epoch, self._length = epoch, self.samples
        self.samples = samples
        """Number of records of this epoch that are done, over all ranks."""
        self._position = position or StreamPosition(len(self.shards))
        self._in_progress.clear()
        self.left_early = self.between_epochs = False

    # --- the batches ---

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches from the position to the end of the epoch."""
        return self._requested(waits_counted(self._batches()))

    def _requested(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.resume_epoch()
        self._begin_requests(seen=True)
        missing = object()
        try:
            while True:
                self._request_batch()
                batch = next(batches, missing)
                if batch is missing:
                    self._iteration.ran_out(self._iteration.requests - 1)
                    return
                yield batch
        finally:
            self._leave_batches()

    def _batches(self) -> Iterator[Any]:
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

        share = piece(self.global_batch_size, self.world_size, self.rank)[1]
        source = self._portions(dealt.lists[self.rank :: self.world_size], Cut(share))
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

        cut = Cut(self.global_batch_size, self.rank, self.world_size, self.max_world_size)
        for portion in self._portions(dealt.lists, cut):
            yield _StepInProgress(dealt, None, portion, portion.total), portion.batch

    def _portions(self, lists: Sequence[Sequence[tuple[int, int]]], cut: Cut) -> Iterator[Portion]:

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

    def _constant_batch(self) -> int | None:
        return self.global_batch_size if self._is_batch_constant else None

    def _samples_done(self) -> int:
        return self.samples

    def _complete_length(self) -> int:
        return self._length  # of the epoch before

    def _left_sentence(self) -> str:
        return (
            f"Epoch {self.epoch} was left after {self.samples} records (as counted by "
            "stream.advance()). If this is not intended, call advance() once for each batch."
        )

    def _begin_next_epoch(self) -> None:
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
            self._count_batch()
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
                f"{self.world_size} ranks. Submit the job with fewer nodes at most."
            )
        tell(
            f"The last records of epoch {self.epoch} are left out, because they are fewer than the "
            "ranks."
        )
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
            "epoch": self.epoch + self.left_early,
            "samples": 0 if self.left_early else self.samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "shards": len(self.shards),
            **(StreamPosition(len(self.shards)) if self.left_early else self._position).state(),
            **self._resumed_epoch.state(),
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
        self._resume(state)
