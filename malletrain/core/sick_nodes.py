"""How long nodes that failed a health check are left alone. Pure.

A node that fails again is left alone for twice as long as before, up to a limit, and never for
ever, because nobody tells MalleTrain that a node was repaired. :mod:`malletrain.core.lease_planner`
decides which leases are taken.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SickNode:
    """One node that failed."""

    since: float
    """When it failed last."""
    until: float
    """Until when it is left alone."""
    sentence: str
    """What was found."""


class SickNodes:
    """Of one machine; times in seconds.

    Args:
        first_s: how long a node is left alone that failed once.
        most_s: how long at most; and a failure so long after the last time counts as the first.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._nodes: dict[str, SickNode] = {}

    def failed(self, node: str, sentence: str, now: float) -> SickNode:
        """The node has failed now."""
        before = self._nodes.get(node)
        if before is not None and now < before.until:  # a lease that was there already
            wait_s = before.until - before.since
        elif before is not None and now < before.until + self._most_s:
            wait_s = min(self._most_s, 2 * (before.until - before.since))
        else:
            wait_s = self._first_s
        self._nodes = {n: s for n, s in self._nodes.items() if now < s.until + self._most_s}
        self._nodes[node] = SickNode(now, now + wait_s, sentence)
        return self._nodes[node]

    def forget(self, node: str) -> None:
        """Somebody says that the node is well."""
        self._nodes.pop(node, None)

    def remember(self, node: str, sick_node: SickNode) -> None:
        """What was known before this process began."""
        self._nodes[node] = sick_node

    def now(self, now: float) -> dict[str, SickNode]:
        """The nodes that are left alone at this time."""
        return {name: node for name, node in self._nodes.items() if now < node.until}
