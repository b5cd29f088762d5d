"""The readers of a stream: they open shards and cut them into portions, in the processes of a
``DataLoader``.

Decides how many records a portion has and where the next one begins; which shards a reader has is
:mod:`malletrain.training.stream_deal`'s.
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
    """How records come out of shards."""

    read: Callable[..., Iterable[Any]]
    """From a shard to its records, always in the same order; with a parameter ``start`` it begins
    at that record by itself.
    """
    decode: Callable[[Any], Any] | None = None
    """From a record to what a batch is made of; called for this rank's records only."""
    collate: Callable[[list[Any]], Any] = default_collate
    """From a list of those to a batch; torch's own way when not said otherwise."""

    def records(self, shard: Any, start: int) -> Iterator[Any]:
        """The records of a shard from the ``start``-th."""
        if start and "start" in inspect.signature(self.read).parameters:
            return iter(self.read(shard, start=start))
        return itertools.islice(iter(self.read(shard)), start, None)

    def batch(self, records: Sequence[Any]) -> Any:
        """A batch of ``records``."""
        return self.collate([self.decode(r) if self.decode else r for r in records])


@dataclass(frozen=True)
class Cut:
    """How a reader cuts its records into portions."""

    batch: int
    """Records of a portion: this rank's share, or with ``ranks`` those of a global batch."""
    rank: int = 0
    """Of this process among ``ranks``."""
    ranks: int = 1
    """Ranks that read the same records and take a share of them each."""
    most_ranks: int = 0
    """With several: a remainder smaller than this is taken into the portion before it. 0: only full
    portions are made.
    """

    def size(self, there: int) -> int:
        """Records of the next portion when the reader holds ``there``, fewer than ``batch`` and
        ``ahead`` together only at its end.
        """
        if there >= self.batch + self.ahead or not self.most_ranks:
            return self.batch if there >= self.batch else 0
        return there if there >= self.ranks else 0

    @property
    def ahead(self) -> int:
        """Records to hold beyond a portion, to know what comes after it."""
        return max(1, self.most_ranks)


class Portion(NamedTuple):
    """What a rank trains on in one step."""

    batch: Any
    """Of the source's ``collate``."""
    share: int
    """Records in it."""
    total: int
    """Records that it was cut from."""
    reader: int
    """Number of this rank's reader that made it."""
    place: int
    """Of the cursor after it: index into the reader's list."""
    records: int
    """Of the cursor after it: records done of that shard."""


def portions(
    source: ShardSource, places: Sequence[tuple[Any, int]], cut: Cut, reader: int = 0
) -> Iterator[Portion]:
    """Cut the records of ``places``, (shard, records to leave out), into portions."""
    portions_: deque[tuple[Any, Cursor]] = deque()
    coming = _numbered(source, places)
    while True:
        missing = cut.batch + cut.ahead - len(portions_)
        portions_.extend(itertools.islice(coming, missing))
        total = cut.size(len(portions_))
        if not total:
            return
        taken = [portions_.popleft()[0] for _ in range(total)]
        first, share = piece(total, cut.ranks, cut.rank)
        index, records = portions_[0][1] if portions_ else (len(places), 0)
        batch = source.batch(taken[first : first + share])
        yield Portion(batch, share, total, reader, index, records)


def _numbered(
    source: ShardSource, places: Sequence[tuple[Any, int]]
) -> Iterator[tuple[Any, Cursor]]:
    for index, (shard, start) in enumerate(places):
        for number, record in enumerate(source.records(shard, start), start):
            yield record, (index, number)


class Readers(IterableDataset[Portion]):
    """The readers of one rank: one for each process of the loader, or one in this process."""

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


def as_it_is(portion: Any) -> Any:
    """What a loader does with a portion that is a batch already."""
    return portion


def loader(readers: Readers, num_workers: int, options: dict[str, Any]) -> Iterator[Portion]:
    """The portions of ``readers``, from each in turn."""
    portions_: Iterator[Portion] = iter(
        DataLoader(
            readers, batch_size=None, collate_fn=as_it_is, num_workers=num_workers, **options
        )
    )
    return portions_
