"""Back-off after refusals: pauses that grow with each refusal.

Decides how long to pause. The caller decides what counts as a refusal. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Backoff:
    """One back-off. Times are in seconds, on the caller's clock."""

    first_pause_s: float
    """Length of the first pause. Each further pause is twice as long."""
    max_pause_s: float
    """Maximum length of a pause."""
    free_refusals: int = 0
    """Number of successive refusals that cause no pause."""
    refusals: int = 0
    """Number of successive refusals. Those during one pause count as one."""
    reason: str = ""
    """The message of the last refusal that counted."""
    _until: float = field(default=-math.inf, repr=False)

    def refused(self, now: float, reason: str = "") -> None:
        """Note a refusal. Refusals of requests that were sent before the pause began do not count
        again.
        """
        if now < self._until:
            return
        self.refusals += 1
        self.reason = reason
        if self.refusals > self.free_refusals:
            times = min(self.refusals - self.free_refusals - 1, 60)
            self._until = now + min(self.max_pause_s, self.first_pause_s * 2.0**times)

    def answered(self, now: float) -> None:
        """Note a success. It ends the back-off, unless the request was sent during the pause."""
        if now >= self._until:
            self.refusals, self.reason, self._until = 0, "", -math.inf

    def remaining_s(self, now: float) -> float:
        """Return the remaining seconds of the pause; 0 if there is none."""
        return max(0.0, self._until - now)
