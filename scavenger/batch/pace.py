"""At which pace the main scheduler is asked to start and to end jobs: a token bucket.

Decides how many requests may be made at a moment. Each submission takes one token. So does each job
that is cancelled, because ``scancel`` sends the controller a request for each job of its command
line; but a cancel never waits: others may be waiting for the node.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable


class TokenBucket:
    """``rate`` tokens come back each second, up to ``burst``. Safe to use from threads."""

    def __init__(
        self,
        rate: float,
        burst: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate = rate
        self.burst = max(1.0, burst)
        self._clock = clock
        self._sleep = sleep
        self._tokens = self.burst
        self._at = clock()
        self._lock = threading.Lock()

    @property
    def whole(self) -> int:
        """Tokens that can be taken now without waiting."""
        with self._lock:
            self._refill()
            return max(0, math.floor(self._tokens + 1e-9))

    def spend(self, count: int = 1) -> float:
        """Take tokens, those to come as well; returns the seconds until they all have come."""
        with self._lock:
            self._refill()
            self._tokens = max(self._tokens - count, -self.burst)
            return max(0.0, -self._tokens / self.rate)

    def wait(self) -> None:
        """Take a token, and wait for it if there is none."""
        with self._lock:
            self._refill()
            self._tokens -= 1.0
            wait_s = max(0.0, -self._tokens / self.rate)
        self._sleep(wait_s)

    def _refill(self) -> None:
        now = self._clock()
        self._tokens = min(self.burst, self._tokens + max(0.0, now - self._at) * self.rate)
        self._at = now
