"""Chooses which snapshot in the nodes' memory is restored, and which node fetches it from which.
Pure.

Snapshots are ordered by the round that took them, then by the steps done. So a snapshot of an older
round, on a node that was not in the later ones, never precedes a later one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class SnapshotTime(NamedTuple):
    """Identifies a snapshot by when it was taken. A larger moment is newer."""

    generation: int
    """Number of the round."""
    steps: int
    """Number of steps done since the beginning of the run."""
    milliseconds: int
    """Time on the node that took it, milliseconds since the epoch."""
    rank: int
    """Rank that took it."""

    def __str__(self) -> str:
        return "-".join(map(str, self))

    @property
    def age(self) -> tuple[int, int]:
        """(generation, steps), for comparisons. Larger is newer."""
        return self.generation, self.steps

    @classmethod
    def parse(cls, text: str) -> SnapshotTime | None:
        """Return the moment of which ``text`` is the ``str()``; None if there is none."""
        parts = text.split("-")
        return cls(*map(int, parts)) if len(parts) == 4 and all(map(str.isdigit, parts)) else None


def age_of(payload: Mapping[str, Any]) -> tuple[int, int]:
    """Return the age of a snapshot, as :attr:`SnapshotTime.age`."""
    return int(payload.get("generation", 0)), int(payload.get("steps", 0))


@dataclass(frozen=True)
class NodeSnapshot:
    """The good files of one snapshot on one node."""

    moment: SnapshotTime
    """Time of the snapshot."""
    files: frozenset[str]
    """Names of its shard files on the node."""
    needed: frozenset[str] = frozenset()
    """Names of all its shard files."""
    size: int = 0
    """Size of the snapshot file, bytes."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Size of each shard file in ``needed``, bytes."""


@dataclass(frozen=True)
class NodeOffer:
    """The snapshots that a node can offer."""

    address: str
    """Address of its keeper; empty if it has none, and hence no memory for snapshots."""
    snapshots: tuple[NodeSnapshot, ...] = ()
    """Snapshots in its memory."""
    on_disk: tuple[tuple[int, int], str] | None = None
    """(age, id) of the newest snapshot that it sees on disk; None if it sees none."""


@dataclass(frozen=True)
class CompleteSnapshot:
    """The newest snapshot of which the nodes together have all files."""

    moment: SnapshotTime
    """Time of the snapshot."""
    holders: tuple[str, ...]
    """Addresses of the keepers that have the snapshot file."""
    files: dict[str, str] = field(default_factory=dict)
    """Address of a keeper that has the file, by name of the shard file."""
    size: int = 0
    """Size of the snapshot file, bytes."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Size of each shard file, bytes."""


def newest(offers: Sequence[NodeOffer]) -> CompleteSnapshot | None:
    """Return the newest snapshot of which the nodes together have all files; None if there is none.

    Args:
        offers: offers of the nodes, in the order of ranks.
    """
    moments = {snapshot.moment for offer in offers for snapshot in offer.snapshots}
    for moment in sorted(moments, key=_order, reverse=True):
        offers_of_moment = [
            (o.address, h) for o in offers for h in o.snapshots if h.moment == moment
        ]
        files = {
            name: address
            for address, snapshot in reversed(offers_of_moment)
            for name in snapshot.files
        }
        if set(offers_of_moment[0][1].needed) <= set(files):
            snapshot = offers_of_moment[0][1]
            return CompleteSnapshot(
                moment, tuple(a for a, _ in offers_of_moment), files, snapshot.size, snapshot.sizes
            )
    return None


def _order(moment: SnapshotTime) -> tuple[int, int, int, int]:
    # Ranks that saved at the same step have the same state; the first rank's is used.
    return (*moment.age, -moment.rank, moment.milliseconds)


def relays(holders: Iterable[str], wanting: Iterable[str]) -> list[dict[str, str]]:
    """Plan the distribution of a file, in turns. In each turn, a node that has it gives it to one
    other node.

    Args:
        holders: keepers that have the file.
        wanting: keepers that need it.

    Returns:
        For each turn: source by fetching keeper.
    """
    have = list(dict.fromkeys(holders))
    remaining = [keeper for keeper in dict.fromkeys(wanting) if keeper not in have]
    turns: list[dict[str, str]] = []
    while remaining and have:
        turn = dict(zip(remaining, have, strict=False))
        remaining = remaining[len(turn) :]
        have += turn
        turns.append(turn)
    return turns


def superseded(moments: Iterable[SnapshotTime], complete: SnapshotTime) -> list[SnapshotTime]:
    """Return the moments that are no longer needed once the snapshot ``complete`` is in place."""
    return [moment for moment in moments if _order(moment) < _order(complete)]
