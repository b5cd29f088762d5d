"""Which rank reads which shards of a stream, and how far all of them have come.

Decides how the shards that are left of an epoch are dealt out to readers, and what position the
readers' cursors add up to. Pure: it opens no shard (:mod:`malletrain.training.stream_loader` does)
and speaks to no rank (:mod:`malletrain.training.stream`).

A *place* is a shard's number in the order of the epoch. A *cursor* is (index into the reader's
list, records of that shard that are done).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Cursor = tuple[int, int]


@dataclass(frozen=True)
class StreamPosition:
    """How far an epoch has come, over all ranks."""

    shards: int
    """Shards of the dataset."""
    done: frozenset[int] = frozenset()
    """Places whose records are all done."""
    begun: Mapping[int, int] = field(default_factory=dict)
    """Records done of places that are neither done nor untouched."""

    def remaining(self) -> list[int]:
        """Places that are not done, in the order of the epoch."""
        return [place for place in range(self.shards) if place not in self.done]

    def state(self) -> dict[str, Any]:
        """As plain numbers: done places as [first, one after the last], begun ones as [place,
        records].
        """
        return {
            "done": [list(span) for span in _spans(sorted(self.done))],
            "begun": [list(pair) for pair in sorted(self.begun.items())],
        }

    @classmethod
    def from_state(cls, shards: int, state: Mapping[str, Any]) -> StreamPosition:
        """The reverse of :meth:`state`.

        Raises:
            ValueError: when there is no such position in a dataset of so many shards.
        """
        done = frozenset(p for first, last in state["done"] for p in range(int(first), int(last)))
        begun = {int(place): int(records) for place, records in state["begun"]}
        places = done | set(begun)
        if places and not 0 <= min(places) <= max(places) < shards:
            raise ValueError(f"ElasticStream: a position beyond the {shards} shards there are.")
        return cls(shards, done, begun)


def _spans(places: Iterable[int]) -> Iterable[tuple[int, int]]:
    first = after = -1
    for place in places:
        if place != after:
            if first >= 0:
                yield first, after
            first = place
        after = place + 1
    if first >= 0:
        yield first, after


@dataclass(frozen=True)
class Deal:
    """What is left of an epoch, dealt out to readers."""

    base: StreamPosition
    """The position that was dealt out."""
    lists: tuple[tuple[tuple[int, int], ...], ...]
    """(place, records done before) for each reader, in the order in which it reads."""
    shared: bool
    """One list, which every rank reads for itself; each takes its share of every global batch."""

    def position(self, cursors: Mapping[int, Cursor]) -> StreamPosition:
        """Where the readers have come to; a reader without a cursor has done nothing."""
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
    """Deal out what is left, so that each of ``world_size * readers`` readers has about as many
    shards. Where there are fewer shards than readers, or with ``shared``, all ranks read all.

    Reader ``r`` of rank ``k`` has the list ``r * world_size + k``.
    """
    remaining = [(place, position.begun.get(place, 0)) for place in position.remaining()]
    hands = world_size * readers
    if shared or len(remaining) < hands:
        return Deal(position, (tuple(remaining),), True)
    return Deal(position, tuple(tuple(remaining[hand::hands]) for hand in range(hands)), False)
