"""The requests that all ranks exchange once per step in one small collective, and the decision
whether all of them leave their group now, and for which round.

:class:`StepWishes` defines the requests only. :mod:`malletrain.elastic.step` decides what follows
from them. :data:`EXCHANGES` says which numbers the ranks of one group exchange. After an upgrade
processes of two versions train together, and a collective in which they send vectors of different
lengths fails. They use the newest exchange that all of them know (:func:`common_exchange`).

:func:`to_wait_for` and :func:`who_stays` decide about a round by what each rank knows
(:class:`Invited`). Rounds follow each other quickly when members are lost or nodes are reclaimed.
Only the members of a round are informed of it, so ranks of one group may know different rounds. The
newest counts. An older one is void, and is never waited for: a rank that is not in its successor is
not informed that it is void.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from malletrain.elastic.peer_pickles import exchanged


class StepWishes(NamedTuple):
    """The requests of one rank, or those that at least one rank has made."""

    go: bool
    """Make this step the last of its group."""
    stop: bool
    """Make this step the last of the loop."""
    save: bool = False
    """Save on all ranks together."""
    hash: bool = False
    """Compute the hash of the state on all ranks together."""
    step: bool = False
    """The rank is inside a step."""
    script: bool = False
    """The rank is about to call a collective of the script, outside of a step."""


class Exchange(NamedTuple):
    """The names of the numbers that a rank sends to the others, in the order of their places in the
    collective.
    """

    wishes: tuple[str, ...]
    """Fields of :class:`StepWishes`, sent in each step."""
    compared: tuple[str, ...]
    """Numbers that must be equal on all ranks (:mod:`malletrain.elastic.same_on_all`), sent in each
    step.
    """
    standing: tuple[str, ...]
    """Fields of :class:`malletrain.elastic.training.Standing`, sent when a group has been formed.
    """
    by_name: bool = False
    """Whether states and the layouts of shards have names for the classes of malletrain, see
    :mod:`malletrain.elastic.peer_pickles`.
    """


_FIRST = Exchange(
    wishes=("go", "stop", "save", "hash", "step", "script"),
    compared=("rate", "batch_size", "changed"),
    standing=("has_state", "updates", "steps", "whole", "epoch_closed", "epoch_run"),
)
EXCHANGES: tuple[Exchange, ...] = (_FIRST, _FIRST._replace(by_name=True))
"""The exchanges that this code knows; the index is the version. A version is never changed or
removed, because workers of an older malletrain know no newer one: another number, another meaning
of a number, another order, or another field of an exchanged class is a new version behind the
others. Workers that do not say which versions they know have version 0.
"""


def common_exchange(counts: Sequence[int], size: int) -> int:
    """Return the newest version that all ranks of a group know.

    Args:
        counts: number of ranks that know each version from 1 on.
        size: number of ranks.
    """
    return max((v for v, count in enumerate(counts, 1) if count >= size), default=0)


@exchanged
@dataclass(frozen=True)
class Invited:
    """What a rank knows of the rounds after its current one."""

    generation: int = 0
    """Number of the newest round that it knows; 0 if none."""
    place: tuple[int, int] | None = None
    """(rank, size) in that round; None until all its members are known to have checked in."""
    void: bool = False
    """The rank has waited for that round, which has become void."""


def _members(rows: Sequence[Invited]) -> dict[int, Invited]:
    """Return the ranks that are members of the newest round, by their current rank."""
    newest = max(row.generation for row in rows)
    return {r: row for r, row in enumerate(rows) if row.generation == newest and newest}


def to_wait_for(rows: Sequence[Invited]) -> int | None:
    """Return the round that some of its members know to be complete, and others do not yet. The
    others will be informed soon; then all ranks exchange their rows again. None if there is no such
    round.
    """
    members = _members(rows).values()
    complete = [row.place is not None for row in members]
    if all(complete) or not any(complete) or any(row.void for row in rows):
        return None
    return max(row.generation for row in members)


def who_stays(rows: Sequence[Invited]) -> dict[int, tuple[int, int]] | None:
    """Return (rank, size) in the next round of each rank that stays, by its current rank. The
    other ranks are leavers. None if no next round is known to be complete, so that the group stays.
    """
    members = _members(rows)
    if not members or any(row.void for row in rows):
        return None
    staying = {r: row.place for r, row in members.items() if row.place is not None}
    return staying if len(staying) == len(members) else None
