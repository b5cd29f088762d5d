"""Decides how long nodes that failed a health check are not leased. Pure.

The time doubles when a node fails again, up to a limit. It is never unlimited, because MalleTrain
is not told of repairs. :mod:`malletrain.core.lease_planner` decides which leases are taken.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SickNode:
    """A node that failed a health check."""

    since: float
    """Time of its last failure."""
    until: float
    """Time until which it is not leased."""
    sentence: str
    """Result of the check, for users."""


class SickNodes:
    """The sick nodes of one machine. All times are in seconds.

    Args:
        first_s: time without leases after a first failure.
        most_s: maximum time without leases. A failure this long after the end of the last one
            counts as a first one.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._nodes: dict[str, SickNode] = {}

    def failed(self, node: str, sentence: str, now: float) -> SickNode:
        """Record a failure of the node. Returns its record."""
        before = self._nodes.get(node)
        if before is not None and now < before.until:  # a lease from before the first failure
            wait_s = before.until - before.since
        elif before is not None and now < before.until + self._most_s:
            wait_s = min(self._most_s, 2 * (before.until - before.since))
        else:
            wait_s = self._first_s
        self._nodes = {n: s for n, s in self._nodes.items() if now < s.until + self._most_s}
        self._nodes[node] = SickNode(now, now + wait_s, sentence)
        return self._nodes[node]

    def forget(self, node: str) -> None:
        """Drop a node that is reported to be healthy."""
        self._nodes.pop(node, None)

    def remember(self, node: str, sick_node: SickNode) -> None:
        """Restore a record from an earlier process."""
        self._nodes[node] = sick_node

    def now(self, now: float) -> dict[str, SickNode]:
        """Return the nodes that are not leased at this time."""
        return {name: node for name, node in self._nodes.items() if now < node.until}
