"""What jobs are charged for their nodes. Pure.

A job is charged for a node from when it gets it until it leaves it, times the site's factor. If the
site charges a minimum time for each lease, the rest of it goes to the job that left the node,
unless another job takes the node over before.
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
    """Until then staying costs nothing more: the lease's least charge."""


@dataclass
class JobAccount:
    """What one job has cost. Times in seconds on the shell's clock, costs in node-seconds."""

    factor: float = 1.0
    """Charged node-seconds for one of the lease."""
    charged_before: float = 0.0
    """Of the holds that are over, and of before the controller was made."""
    holds: dict[str, _Hold] = field(default_factory=dict)
    owed: dict[str, float] = field(default_factory=dict)
    """Node that it left → until when its least charge goes on."""
    _since: float = 0.0
    _paid_until: float = -math.inf

    def takes(self, node: str, since: float, paid_until: float) -> None:
        """It holds the node since then."""
        self.holds[node] = _Hold(since, paid_until)
        self.owed.pop(node, None)
        self._since += since
        self._paid_until = max(self._paid_until, paid_until)

    def leaves(self, node: str, now: float) -> None:
        """It holds the node no more."""
        hold = self.holds.pop(node)
        self._since = self._since - hold.since if self.holds else 0.0
        self.charged_before += self.factor * (max(now, hold.paid_until) - hold.since)
        if hold.paid_until > now:
            self.owed[node] = hold.paid_until

    def taken_over(self, nodes: Collection[str], now: float) -> None:
        """Other jobs have these nodes now: what is left of their least charge is theirs."""
        for node in [n for n in self.owed if n in nodes]:
            self.charged_before -= self.factor * max(0.0, self.owed.pop(node) - now)

    def gone(self, node: str) -> None:
        """The lease of a node that it left is over: what was left of the least charge stays its."""
        del self.owed[node]

    def charged(self, now: float) -> float:
        """What it has cost if it leaves all its nodes now."""
        if now >= self._paid_until:  # as nearly always: nothing need be looked at one by one
            open_s = len(self.holds) * now - self._since
        else:
            open_s = sum(max(now, hold.paid_until) - hold.since for hold in self.holds.values())
        return self.charged_before + self.factor * open_s

    def costs_more_at(self, budget_s: float, now: float) -> float:
        """From when on it costs more than ``budget_s`` if it stays on the nodes it has; infinite
        without nodes.
        """
        remaining_s = budget_s - self.charged(now)
        if self.holds and remaining_s > 0 and now >= self._paid_until:
            return now + remaining_s / (self.factor * len(self.holds))
        ends = sorted(max(now, hold.paid_until) for hold in self.holds.values())
        if not ends:
            return math.inf
        at, paying = ends[0], 0
        if remaining_s <= 0:
            return at
        for end in [*ends, math.inf]:
            if paying and self.factor * paying * (end - at) >= remaining_s:
                return at + remaining_s / (self.factor * paying)
            remaining_s -= self.factor * paying * (end - at) if paying else 0.0
            at, paying = end, paying + 1
        return math.inf
