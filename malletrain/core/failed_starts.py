"""Counts the leases from which no agent reports, because the agent ended before or cannot reach the
daemon, and decides for how long the leases of a user are not requested then. Pure.

If no agent can start anywhere, because the nodes' Python cannot import MalleTrain or a directory is
not mounted there, every idle node would be leased and released again and again, and each time the
main scheduler would have to wait for it. Requests for the leases of a user are paused when more
than :data:`FREE_FAILED_STARTS` starts in a row failed, on at least :data:`MIN_FAILED_NODES` nodes.
The reasons of the failures need not be equal, because they may name nodes, processes and addresses.
A single node on which agents do not start says nothing about the others, and requests are paused
for that node alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from scavenger.backoff import Backoff
from scavenger.hostlist import named
from scavenger.interface import host_of, kind_of

FIRST_OWNER_PAUSE_S, TOGETHER_S = 20.0, 1.0
"""Length of an owner's first pause after failures in a row, seconds, which each further failure
doubles; and the time after a failure in which further ones do not count, seconds: their leases were
requested together with the first.
"""
FREE_FAILED_STARTS = 2
"""Number of failed starts in a row that cause no pause."""
MIN_FAILED_NODES = 2
"""Minimum number of different nodes on which starts failed before leases are paused."""
MAX_FAILURE_AGE_S = 3600.0
"""Time after which a failed start is no longer reported, seconds."""


@dataclass(frozen=True)
class FailedStart:
    """The newest failed start on one node."""

    node: str
    """Name of the node."""
    reason: str
    """Why no agent reported, as words without a full stop."""
    at: float
    """Time of the failure, seconds on the shell's clock."""


@dataclass
class _OwnersStarts:
    """Failed starts of one owner's leases."""

    backoff: Backoff
    in_a_row: int = 0
    """Number of failed leases since the last one whose agent reported."""
    by_node: dict[str, FailedStart] = field(default_factory=dict)
    """Node → newest failure, if no agent has reported from there since."""
    nodes: set[str] = field(default_factory=set)
    """Nodes, or hosts of slots, on which starts failed since the last one that succeeded
    anywhere.
    """


class FailedStarts:
    """Failed starts of all owners of one machine.

    Args:
        max_pause_s: maximum time without requests, seconds.
    """

    def __init__(self, max_pause_s: float) -> None:
        self._max_pause_s = max_pause_s
        self._owners: dict[str, _OwnersStarts] = {}

    def failed(self, owner: str, node: str, reason: str, now: float) -> None:
        """Note that no agent reported from a lease.

        Args:
            owner: user as whom the lease ran; empty for the daemon's user.
            node: its node.
            reason: why, as words without a full stop.
            now: time, seconds.
        """
        starts = self._owners.get(owner)
        if starts is None:
            backoff = Backoff(
                FIRST_OWNER_PAUSE_S, self._max_pause_s, FREE_FAILED_STARTS, TOGETHER_S
            )
            starts = self._owners[owner] = _OwnersStarts(backoff)
        # Slots of one host fail together: the first one says what the others do.
        is_known = bool(kind_of(node)) and host_of(node) in starts.nodes
        starts.in_a_row += 1
        starts.nodes.add(host_of(node))
        starts.by_node.pop(node, None)  # the newest comes last
        starts.by_node[node] = FailedStart(node, reason, now)
        if not is_known:
            starts.backoff.refused(now, reason)

    def started(self, owner: str, node: str) -> None:
        """Note that the agent of a lease of ``owner`` on ``node`` has reported."""
        if (starts := self._owners.get(owner)) is None:
            return
        starts.by_node.pop(node, None)
        starts.in_a_row = 0
        starts.nodes.clear()
        starts.backoff = Backoff(
            FIRST_OWNER_PAUSE_S, self._max_pause_s, FREE_FAILED_STARTS, TOGETHER_S
        )
        if not starts.by_node:
            del self._owners[owner]

    def pause_s(self, owner: str, now: float) -> float:
        """Return the seconds for which no lease of ``owner`` is requested; 0 for no pause."""
        starts = self._owners.get(owner)
        if starts is None or len(starts.nodes) < MIN_FAILED_NODES:
            return 0.0
        return starts.backoff.remaining_s(now)

    @property
    def owners(self) -> Collection[str]:
        """The users whose leases failed to start."""
        return self._owners.keys()

    def in_a_row(self, owner: str, now: float) -> int:
        """Return the number of ``owner``'s leases that failed since the last agent reported; 0 if
        the newest failure is older than MAX_FAILURE_AGE_S.
        """
        return self._owners[owner].in_a_row if self.recent(owner, now) else 0

    def last(self, owner: str, now: float) -> FailedStart | None:
        """Return the newest failed start of ``owner``; None if there is none within
        MAX_FAILURE_AGE_S.
        """
        recent = self.recent(owner, now)
        return recent[-1] if recent else None

    def recent(self, owner: str, now: float) -> tuple[FailedStart, ...]:
        """Return the failed starts of ``owner`` on nodes from which no agent has reported since,
        the newest last; without those older than MAX_FAILURE_AGE_S.
        """
        starts = self._owners.get(owner)
        return tuple(
            failure
            for failure in (starts.by_node.values() if starts else ())
            if now < failure.at + MAX_FAILURE_AGE_S
        )

    def sentence(self, owner: str, now: float) -> str:
        """Return which leases of ``owner`` failed to start and why, as sentences; empty if none
        did.
        """
        recent = self.recent(owner, now)
        if not recent:
            return ""
        whose = f" as {owner}" if owner else ""
        names = sorted(failure.node for failure in recent)
        where = names[0] if len(names) == 1 else f"{len(names)} nodes ({named(names)})"
        last = recent[-1]
        on = "" if len(names) == 1 else f" on {last.node}"
        text = (
            f"Leases{whose} start on {where}, and no agent reports from them. "
            f"The last one{on}: {last.reason}."
        )
        if pause_s := self.pause_s(owner, now):
            text += f" {self.in_a_row(owner, now)} failed in a row; the next is requested in "
            text += f"{pause_s:.0f} s."
        return text
