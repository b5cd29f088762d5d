"""Deals the shards of a stream out to the ranks' readers, and computes the position of all ranks.

Decides which reader gets which of the remaining shards of an epoch, and computes the position from
the readers' cursors. Pure: it opens no shard and sends nothing to other ranks
(:mod:`malletrain.training.stream` does both).

A *place* is a shard's index in the order of the epoch. A *cursor* is (index into the reader's list,
number of records of that shard that are done).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
            raise ValueError(f"ElasticStream: a position beyond the {shards} shards there are.")
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
