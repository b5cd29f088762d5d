"""Leaving somebody alone for a while who has refused, for longer each time.

Decides for how long; who it is and what counts as a refusal is its caller's business. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Backoff:
    """One back-off. Times in seconds, on whatever clock the caller has."""

    first_s: float
    """How long the first time; twice as long each further time."""
    most_s: float
    """Never longer than this."""
    free: int = 0
    """So many refusals in a row change nothing."""
    refusals: int = 0
    """In a row; those of one time of waiting count as one."""
    reason: str = ""
    """The words of the last one that counted."""
    _until: float = field(default=-math.inf, repr=False)

    def refused(self, now: float, reason: str = "") -> None:
        """It refused. What was under way already when it first did is no further refusal."""
        if now < self._until:
            return
        self.refusals += 1
        self.reason = reason
        if self.refusals > self.free:
            times = min(self.refusals - self.free - 1, 60)
            self._until = now + min(self.most_s, self.first_s * 2.0**times)

    def answered(self, now: float) -> None:
        """It did not refuse. That ends the back-off, unless it was asked before its time was up."""
        if now >= self._until:
            self.refusals, self.reason, self._until = 0, "", -math.inf

    def remaining_s(self, now: float) -> float:
        """Seconds for which it is left alone still; 0: it may be asked."""
        return max(0.0, self._until - now)
