"""Limits a rate: a token bucket.

Decides how much may be spent now, and when more may be. The caller decides what a token is. Nothing
here waits.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable


class TokenBucket:
    """A token bucket. Safe to use from several threads.

    Args:
        rate: tokens that are added per second.
        burst: maximum number of tokens.
        clock: returns the time, seconds, with any origin.
        max_debt: maximum number of future tokens that are spent; ``burst`` by default. What is
            spent beyond it is not paid for.
    """

    def __init__(
        self,
        rate: float,
        burst: float,
        clock: Callable[[], float] = time.monotonic,
        max_debt: float | None = None,
    ) -> None:
        self.rate = rate
        self.burst = burst
        self._max_debt = burst if max_debt is None else max_debt
        self._clock = clock
        self._tokens = burst
        self._at = clock()
        self._lock = threading.Lock()

    @property
    def tokens(self) -> float:
        """Number of tokens; negative if future ones are spent."""
        with self._lock:
            self._refill()
            return self._tokens

    @property
    def available(self) -> int:
        """Number of tokens that can be taken now without waiting."""
        return max(0, math.floor(self.tokens + 1e-9))

    def missing_s(self, count: float) -> float:
        """Return the seconds until ``count`` tokens are available; 0 if they are."""
        return max(0.0, (min(count, self.burst) - self.tokens) / self.rate)

    def spend(self, count: float = 1) -> float:
        """Take tokens, including future ones. Return the seconds until all of them are available.
        A negative ``count`` gives tokens back.
        """
        with self._lock:
            self._refill()
            self._tokens = min(self.burst, max(self._tokens - count, -self._max_debt))
            return max(0.0, -self._tokens / self.rate)

    def take(self) -> bool:
        """Take a token if one is available. Return whether one was."""
        with self._lock:
            self._refill()
            is_available = self._tokens >= 1.0 - 1e-9
            self._tokens -= is_available
            return is_available

    def _refill(self) -> None:
        now = self._clock()
        self._tokens = min(self.burst, self._tokens + max(0.0, now - self._at) * self.rate)
        self._at = now
