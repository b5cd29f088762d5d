"""Leases that share one job of the main scheduler: an array of one-node tasks, or a block of nodes.

To everybody else a lease is of one node, whatever its job looks like. This module decides which
leases may share a job, what that job is called, and which lease a node of it is. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeVar

Shape = Literal["single", "array", "block"]
"""``single``: a job for each lease. ``array``: a task of a job array for each. ``block``: a node of
a job of several for each.
"""
MAX_NAME = 160
"""Longest list of leases in the name of a job, in characters. PBS allows 230 in all."""
MOST = 64
"""Most leases that share a job."""
ALIKE = 2.0
"""Leases that share a job have one time limit, the shortest: their own are within this factor."""
_LEASES = re.compile(r"([A-Za-z]+)(\d+(?:-\d+)?(?:\+\d+(?:-\d+)?)*)")
_LEASE = re.compile(r"([A-Za-z]+)(\d+)")

T = TypeVar("T")


class PartOf(NamedTuple):
    """Where a lease is in a job that it shares."""

    job: str
    """The main scheduler's id of the job."""
    node: str
    first: bool = False
    """Whether the job's own script runs there: such a node goes last."""
    removable: bool = False
    """Whether the job can give back this node alone."""

    @property
    def id(self) -> str:
        """What the part is called; no command of a scheduler takes it for a job."""
        return f"{self.job}/{self.node}"


def is_part(scheduler_id: str) -> bool:
    """Whether this is the id of a part, not of a job."""
    return "/" in scheduler_id


def unknown(name: str, node: str) -> str:
    """In place of a lease: the node of a job that is of no lease any more."""
    return f"{name}@{node}"


def is_unknown(lease: str) -> bool:
    """Whether it stands in place of a lease."""
    return "@" in lease


def name_of(leases: Iterable[str]) -> str | None:
    """What the job of these leases is called: ``l17-19+25``. None: they cannot share one."""
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
    """The leases that the job of this name is of; none when it is of one."""
    match = _LEASES.fullmatch(name)
    if match is None or len(name) > MAX_NAME + len(match[1]) or _LEASE.fullmatch(name):
        return ()
    leases: list[str] = []
    for run in match[2].split("+"):
        first, _, last = run.partition("-")
        low, high = int(first), int(last or first)
        if high - low >= MOST - len(leases):  # none of ours
            return ()
        leases += [f"{match[1]}{number}" for number in range(low, high + 1)]
    return tuple(leases)


def packs(
    specs: Sequence[T],
    most: int,
    lease_of: Callable[[T], str],
    alike: Callable[[T], Hashable],
    limit_of: Callable[[T], float],
) -> list[list[T]]:
    """Which leases share a job: those that are ``alike``, with similar time limits, at most so
    many.

    Args:
        specs: what is asked for.
        most: leases that may share a job.
        lease_of: the id of one.
        alike: its owner and whatever else the leases of one job have in common.
        limit_of: its time limit, seconds.
    """
    kinds: dict[Hashable, list[T]] = {}
    for one in specs:
        kinds.setdefault(alike(one), []).append(one)
    packed: list[list[T]] = []
    for kind in kinds.values():
        pack: list[T] = []
        for one in sorted(kind, key=limit_of):
            if (
                not pack
                or len(pack) >= most
                or limit_of(one) > ALIKE * limit_of(pack[0])
                or name_of([lease_of(other) for other in (*pack, one)]) is None
            ):
                pack = []
                packed.append(pack)
            pack.append(one)
    return packed
