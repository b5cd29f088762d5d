"""Which state a group goes on with: how far each process is, and what it has kept of before.

Decides the order in which states are tried: the newest first. Whether all of one is there is
:mod:`malletrain.elastic.sharded.sharing`'s to see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Version:
    """A state of the run. Two of one version have the same numbers."""

    updates: int
    """Updates of the optimizer."""
    steps: int
    """Steps that count."""
    history: str
    """Another one each time the run went back."""

    def follows(self, other: Version) -> bool:
        """Whether it is ``other`` after one update."""
        return self.updates == other.updates + 1 and self.history == other.history


@dataclass(frozen=True)
class ShardStanding:
    """How far a process is."""

    live: Version | None
    """What it trains; None for a joiner."""
    whole: bool
    """No step broke off between two of its updates."""
    pending: bool
    """It has all gradients of the next update and has not made it."""
    copies: tuple[Version, ...]
    """Of which it has copies."""


def candidates(table: Sequence[ShardStanding]) -> list[Version]:
    """The states that somebody has a part of, the newest first."""
    versions = {one.live for one in table if one.live is not None}
    return sorted(versions | {version for one in table for version in one.copies}, reverse=True)


def source_of(table: Sequence[ShardStanding], version: Version) -> int:
    """The rank that says what belongs to a state beside its shards: one that finished its step, if
    any.
    """
    live = [rank for rank, one in enumerate(table) if one.live == version]
    whole = [rank for rank in live if table[rank].whole]
    copy_holders = [rank for rank, one in enumerate(table) if version in one.copies]
    return next(iter((*whole, *live, *copy_holders)))


def holdings(table: Sequence[ShardStanding], version: Version) -> list[bool]:
    """In which ways to look whether all of a state is there: with the copies of those that train it
    left out, and with them. One that trains it may be the only one with a copy of a lost peer's
    shards of it: the others are an update ahead.
    """
    trained_and_copied = any(one.live == version and version in one.copies for one in table)
    return [False, True] if trained_and_copied else [False]
