"""Whether all ranks of a group leave it now, and for which round, by what each of them was told.

Rounds follow each other quickly when members are lost or nodes wanted. Only members are told of a
round, so that ranks of one group may know of different ones; the newest counts, and an older one is
never waited for: it came to nothing, which those that are not in its successor do not hear. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Invited:
    """What a rank knows of the rounds after its own."""

    generation: int = 0
    """The newest it was told of; 0: none."""
    place: tuple[int, int] | None = None
    """(rank, size) there, once all its members are known to be there."""
    void: bool = False
    """It was waited for and came to nothing."""


def _members(rows: Sequence[Invited]) -> dict[int, Invited]:
    """Those that are in the newest round, by their rank in this one."""
    newest = max(row.generation for row in rows)
    return {r: row for r, row in enumerate(rows) if row.generation == newest and newest}


def to_wait_for(rows: Sequence[Invited]) -> int | None:
    """The round that some of its members know to be complete, and others not yet: those hear of it
    in a moment, and everybody is to be asked again then. None: there is nothing to wait for.
    """
    members = _members(rows).values()
    complete = [row.place is not None for row in members]
    if all(complete) or not any(complete) or any(row.void for row in rows):
        return None
    return max(row.generation for row in members)


def who_stays(rows: Sequence[Invited]) -> dict[int, tuple[int, int]] | None:
    """(rank, size) in the next round of those that stay, by their rank in this one; the others are
    leavers. None: nobody knows a next round to be complete, and the group stays.
    """
    members = _members(rows)
    if not members or any(row.void for row in rows):
        return None
    staying = {r: row.place for r, row in members.items() if row.place is not None}
    return staying if len(staying) == len(members) else None
