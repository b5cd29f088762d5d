"""Leases that share one job of the main scheduler: an array of one-node tasks, a block of nodes, or
the slots of a host that the job has as a whole.

All other modules treat a lease as one node, whatever its job looks like. This module decides which
leases can share a job, the name of that job, and which lease belongs to each of its nodes. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeVar

from scavenger.interface import kind_of

Shape = Literal["single", "array", "block"]
"""``single``: one job per lease. ``array``: one task of a job array per lease. ``block``: one node
of a multi-node job per lease.
"""
MAX_NAME = 160
"""Maximum length of the list of leases in a job's name, characters. PBS allows 230 for the whole
name.
"""
MAX_LEASES_PER_JOB = 64
"""Maximum number of leases that share a job."""
MAX_LIMIT_RATIO = 2.0
"""Leases that share a job have one time limit, the shortest of theirs. Maximum ratio of the longest
to the shortest.
"""
_LEASES = re.compile(r"([A-Za-z]+)(\d+(?:-\d+)?(?:\+\d+(?:-\d+)?)*)")
_LEASE = re.compile(r"([A-Za-z]+)(\d+)")

T = TypeVar("T")


class PartOf(NamedTuple):
    """A lease's part of a job that it shares."""

    job: str
    """The main scheduler's id of the job."""
    node: str
    """Node or slot of the lease in the job."""
    first: bool = False
    """Whether the job's own script runs on this node. Such a node is released last. Never set for
    a slot: those of a host are released together.
    """
    removable: bool = False
    """Whether the lease can end before the job: it releases this node, or the step of this slot
    ends.
    """

    @property
    def ends_with_others(self) -> bool:
        """Whether the other leases of the job have to leave with this one."""
        return self.first or bool(kind_of(self.node))

    @property
    def id(self) -> str:
        """Id of the part. Commands of the scheduler do not accept it as a job id."""
        return f"{self.job}/{self.node}"


def unknown(name: str, node: str) -> str:
    """Return a placeholder for the lease, for a node of a job that no longer belongs to a lease."""
    return f"{name}@{node}"


def is_unknown(lease: str) -> bool:
    """Return whether ``lease`` is such a placeholder."""
    return "@" in lease


def name_of(leases: Iterable[str]) -> str | None:
    """Return the name of the job of these leases, such as ``l17-19+25``; None if they cannot share
    one.
    """
    matches = [_LEASE.fullmatch(lease) for lease in leases]
    letters = {match[1] for match in matches if match}
    if len(letters) != 1 or not all(matches):
        return None
    runs: list[list[int]] = []
    for number in sorted(int(match[2]) for match in matches if match):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = "+".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return letters.pop() + text if len(text) <= MAX_NAME else None


def leases_in(name: str) -> tuple[str, ...]:
    """Return the leases of the job with this name; empty if it belongs to a single lease."""
    match = _LEASES.fullmatch(name)
    if match is None or len(name) > MAX_NAME + len(match[1]) or _LEASE.fullmatch(name):
        return ()
    leases: list[str] = []
    for run in match[2].split("+"):
        low_digits, _, high_digits = run.partition("-")
        low, high = int(low_digits), int(high_digits or low_digits)
        if high - low >= MAX_LEASES_PER_JOB - len(leases):  # not a name of ours
            return ()
        leases += [f"{match[1]}{number}" for number in range(low, high + 1)]
    return tuple(leases)


def packs(
    specs: Sequence[T],
    max_leases: int,
    lease_of: Callable[[T], str],
    alike: Callable[[T], Hashable],
    limit_of: Callable[[T], float],
) -> list[list[T]]:
    """Return which leases share a job: those that are ``alike`` and have similar time limits.

    Args:
        specs: the requested leases.
        max_leases: maximum number of leases in a job.
        lease_of: returns the id of a lease.
        alike: returns its owner and everything else that the leases of one job have in common.
        limit_of: returns its time limit, seconds.
    """
    kinds: dict[Hashable, list[T]] = {}
    for spec in specs:
        kinds.setdefault(alike(spec), []).append(spec)
    packed: list[list[T]] = []
    for kind in kinds.values():
        pack: list[T] = []
        for spec in sorted(kind, key=limit_of):
            if (
                not pack
                or len(pack) >= max_leases
                or limit_of(spec) > MAX_LIMIT_RATIO * limit_of(pack[0])
                or name_of([lease_of(other) for other in (*pack, spec)]) is None
            ):
                pack = []
                packed.append(pack)
            pack.append(spec)
    return packed
