"""Which of the snapshots in the nodes' memory is restored, and who gets it from whom. Pure.

A snapshot is ordered by the round that took it, then by the steps done: what a node that was away
still holds of an older round does not count beside what the others did since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Files = Mapping[str, tuple[int, int]]
"""Name → (size, CRC-32) of files."""


class Moment(NamedTuple):
    """When a snapshot was taken; the larger is the newer."""

    generation: int
    """The round."""
    steps: int
    """Done since the beginning of the run."""
    milliseconds: int
    """Since the epoch, on the node that took it."""
    rank: int
    """That took it."""

    def __str__(self) -> str:
        return "-".join(map(str, self))

    @property
    def age(self) -> tuple[int, int]:
        """What it is compared with another's by: larger is newer."""
        return self.generation, self.steps

    @classmethod
    def parse(cls, text: str) -> Moment | None:
        """The one that ``str`` made the text of."""
        parts = text.split("-")
        return cls(*map(int, parts)) if len(parts) == 4 and all(map(str.isdigit, parts)) else None


def age_of(payload: Mapping[str, Any]) -> tuple[int, int]:
    """The age of a snapshot, as :attr:`Moment.age`."""
    return int(payload.get("generation", 0)), int(payload.get("steps", 0))


@dataclass(frozen=True)
class NodeSnapshot:
    """What a node has of one snapshot, looked through and found good."""

    moment: Moment
    files: frozenset[str]
    """Names of those that are there, without that of the snapshot itself."""
    needed: frozenset[str] = frozenset()
    """Names of those that the snapshot consists of."""
    size: int = 0
    """Bytes of the snapshot's own file."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each of those that are needed."""


@dataclass(frozen=True)
class NodeOffer:
    """What a node has."""

    address: str
    """Of its keeper; empty: it has none, and no memory either."""
    snapshots: tuple[NodeSnapshot, ...] = ()
    on_disk: tuple[tuple[int, int], str] | None = None
    """Age and id of the newest snapshot that it sees on disk."""


@dataclass(frozen=True)
class CompleteSnapshot:
    """The newest snapshot of which everything is there."""

    moment: Moment
    holders: tuple[str, ...]
    """Keepers of nodes with the snapshot's own file."""
    files: dict[str, str] = field(default_factory=dict)
    """Keeper of a node with each of the others."""
    size: int = 0
    """Bytes of the snapshot's own file."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the others."""


def newest(offers: Sequence[NodeOffer]) -> CompleteSnapshot | None:
    """The newest snapshot that the nodes have all of together; None for none.

    Args:
        offers: of each node, the first rank's first.
    """
    moments = {snapshot.moment for offer in offers for snapshot in offer.snapshots}
    for moment in sorted(moments, key=_order, reverse=True):
        mine = [(o.address, h) for o in offers for h in o.snapshots if h.moment == moment]
        files = {name: address for address, snapshot in reversed(mine) for name in snapshot.files}
        if set(mine[0][1].needed) <= set(files):
            snapshot = mine[0][1]
            return CompleteSnapshot(
                moment, tuple(a for a, _ in mine), files, snapshot.size, snapshot.sizes
            )
    return None


def _order(moment: Moment) -> tuple[int, int, int, int]:
    # Ranks that saved at one step have one state; the first one's is as good as any.
    return (*moment.age, -moment.rank, moment.milliseconds)


def relays(holders: Iterable[str], wanting: Iterable[str]) -> list[dict[str, str]]:
    """Who fetches from whom, turn by turn: each that has it gives it to one other at a time.

    Args:
        holders: have it already.
        wanting: are to have it.

    Returns:
        For each turn: who fetches → from whom.
    """
    have = list(dict.fromkeys(holders))
    remaining = [one for one in dict.fromkeys(wanting) if one not in have]
    turns: list[dict[str, str]] = []
    while remaining and have:
        turn = dict(zip(remaining, have, strict=False))
        remaining = remaining[len(turn) :]
        have += turn
        turns.append(turn)
    return turns


def superseded(moments: Iterable[Moment], complete: Moment) -> list[Moment]:
    """Those that are not needed any more once ``complete`` is, whole, where it has to be."""
    return [one for one in moments if _order(one) < _order(complete)]
