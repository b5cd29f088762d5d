"""Computes what jobs are charged for their nodes. Pure.

A job is charged for a node from when it gets it until it leaves it, times the site's factor. If the
site charges a minimum time for each lease, the job that left the node pays the rest of it, unless
another job takes the node over before.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class _Hold:
    """One node of one job."""

    since: float
    paid_until: float
    """Time before which staying costs nothing more, because of the lease's minimum charge."""


@dataclass
class JobAccount:
    """The charges of one job. Times in seconds on the shell's clock, costs in node-seconds."""

    factor: float = 1.0
    """Charged node-seconds per node-second of a lease."""
    charged_before: float = 0.0
    """Charges of ended holds, and of the time before the controller was created."""
    holds: dict[str, _Hold] = field(default_factory=dict)
    owed: dict[str, float] = field(default_factory=dict)
    """Node that it left → end of the minimum charge."""
    _since: float = 0.0
    _paid_until: float = -math.inf

    def takes(self, node: str, since: float, paid_until: float) -> None:
        """Add a node that it holds since ``since``."""
        self.holds[node] = _Hold(since, paid_until)
        self.owed.pop(node, None)
        self._since += since
        self._paid_until = max(self._paid_until, paid_until)

    def leaves(self, node: str, now: float) -> None:
        """Remove a node that it no longer holds."""
        hold = self.holds.pop(node)
        self._since = self._since - hold.since if self.holds else 0.0
        self.charged_before += self.factor * (max(now, hold.paid_until) - hold.since)
        if hold.paid_until > now:
            self.owed[node] = hold.paid_until

    def taken_over(self, nodes: Collection[str], now: float) -> None:
        """Drop the rest of the minimum charge of these nodes, which other jobs have now."""
        for node in [n for n in self.owed if n in nodes]:
            self.charged_before -= self.factor * max(0.0, self.owed.pop(node) - now)

    def gone(self, node: str) -> None:
        """Keep the rest of the minimum charge of a node that it left: its lease has ended."""
        del self.owed[node]

    def charged(self, now: float) -> float:
        """Return its charge in node-seconds if it leaves all its nodes now."""
        if now >= self._paid_until:  # nearly always, so no loop is needed
            open_s = len(self.holds) * now - self._since
        else:
            open_s = sum(max(now, hold.paid_until) - hold.since for hold in self.holds.values())
        return self.charged_before + self.factor * open_s

    def costs_more_at(self, budget_s: float, now: float) -> float:
        """Return the time at which its charge exceeds ``budget_s`` if it stays on its nodes;
        infinite without nodes.
        """
        remaining_s = budget_s - self.charged(now)
        if self.holds and remaining_s > 0 and now >= self._paid_until:
            return now + remaining_s / (self.factor * len(self.holds))
        ends = sorted(max(now, hold.paid_until) for hold in self.holds.values())
        if not ends:
            return math.inf
        time, paying_nodes = ends[0], 0
        if remaining_s <= 0:
            return time
        for end in [*ends, math.inf]:
            if paying_nodes and self.factor * paying_nodes * (end - time) >= remaining_s:
                return time + remaining_s / (self.factor * paying_nodes)
            remaining_s -= self.factor * paying_nodes * (end - time) if paying_nodes else 0.0
            time, paying_nodes = end, paying_nodes + 1
        return math.inf
