"""Readers of a stream: open shards and cut them into portions, in the processes of a
``DataLoader``.

Decides how many records a portion has and where the next one begins.
:mod:`malletrain.training.stream_deal` decides which shards a reader has.
"""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from malletrain.training.epoch_plan import piece
from malletrain.training.stream_deal import Cursor
from malletrain.training.torch_private import forget_worker


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
    """The readers of one rank: one in each process of the loader, or one in this process."""

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
