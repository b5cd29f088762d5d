"""The versions of the state from which a group can continue: those that its processes train, and
those of which they have copies.

Decides the order in which versions are tried: the newest first.
:mod:`malletrain.elastic.sharded.sharing` checks whether a version is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Version:
    """A version of the state. States of one version are equal."""

    updates: int
    """Number of optimizer updates."""
    steps: int
    """Number of steps that count."""
    history: str
    """Identifier of the history. It changes each time the run goes back to an earlier state."""

    def follows(self, other: Version) -> bool:
        """Returns whether this is the version after one update of ``other``."""
        return self.updates == other.updates + 1 and self.history == other.history


@dataclass(frozen=True)
class ShardStanding:
    """The progress of a process, and the copies that it has."""

    live: Version | None
    """Version that it trains; None for a joiner."""
    whole: bool
    """Its last step was not interrupted between two of its updates."""
    pending: bool
    """It has all gradients of the next update, and has not made the update."""
    copies: tuple[Version, ...]
    """Versions of its copies."""


def candidates(table: Sequence[ShardStanding]) -> list[Version]:
    """Returns the versions of which any process has a part, the newest first."""
    versions = {row.live for row in table if row.live is not None}
    return sorted(versions | {version for row in table for version in row.copies}, reverse=True)


def source_of(table: Sequence[ShardStanding], version: Version) -> int:
    """Returns the rank that sends the state without its shards: one that finished its step, if
    any.
    """
    live = [rank for rank, row in enumerate(table) if row.live == version]
    whole = [rank for rank in live if table[rank].whole]
    copy_holders = [rank for rank, row in enumerate(table) if version in row.copies]
    return next(iter((*whole, *live, *copy_holders)))


def holdings(table: Sequence[ShardStanding], version: Version) -> list[bool]:
    """Returns, for each attempt to find all parts of a version, whether processes that train it
    offer their copies of it as well. Such a process may have the only copy of the shards of a lost
    peer, if the other processes are an update ahead.
    """
    trained_and_copied = any(row.live == version and version in row.copies for row in table)
    return [False, True] if trained_and_copied else [False]
