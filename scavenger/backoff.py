"""Pauses that double: after each refusal, failure or attempt, up to a maximum.

Decides how long a pause is (:func:`doubled_s`), and when a series of refusals causes the next one
(:class:`Backoff`). The caller decides what counts as a refusal. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MAX_DOUBLINGS = 60
"""Number of doublings after which any pause has reached its maximum."""


def doubled_s(first_s: float, doublings: int, max_s: float) -> float:
    """Return the length of a pause, seconds.

    Args:
        first_s: length of the first pause, seconds.
        doublings: number of pauses before this one, any number from 0.
        max_s: maximum length, seconds.
    """
    return min(max_s, first_s * 2.0 ** min(doublings, MAX_DOUBLINGS))


@dataclass
class Backoff:
    """One back-off. Times are in seconds, on the caller's clock."""

    first_pause_s: float
    """Length of the first pause. Each further pause is twice as long."""
    max_pause_s: float
    """Maximum length of a pause."""
    free_refusals: int = 0
    """Number of successive refusals that cause no pause."""
    together_s: float = 0.0
    """Time after a refusal without a pause in which further ones do not count, seconds."""
    refusals: int = 0
    """Number of successive refusals. Those during one pause count as one."""
    reason: str = ""
    """The message of the last refusal that counted."""
    _until: float = field(default=-math.inf, repr=False)
    _counts_from: float = field(default=-math.inf, repr=False)
    """Time from which the next refusal counts."""

    def refused(self, now: float, reason: str = "") -> None:
        """Note a refusal. Refusals of requests that were sent before the pause began do not count
        again.
        """
        if now < self._counts_from:
            return
        self.refusals += 1
        self.reason = reason
        self._counts_from = now + self.together_s
        if self.refusals > self.free_refusals:
            doublings = self.refusals - self.free_refusals - 1
            self._until = now + doubled_s(self.first_pause_s, doublings, self.max_pause_s)
            self._counts_from = self._until

    def answered(self, now: float) -> None:
        """Note a success. It ends the back-off, unless the request was sent during the pause."""
        if now >= self._until:
            self.refusals, self.reason = 0, ""
            self._until = self._counts_from = -math.inf

    def remaining_s(self, now: float) -> float:
        """Return the remaining seconds of the pause; 0 if there is none."""
        return max(0.0, self._until - now)
