"""At which pace the main scheduler is asked: token buckets, one for jobs that are started and
ended, one for everything that is sent to its controller.

Decides how many requests may be made at a moment. Each submission takes a token. So does each job
that is cancelled, because ``scancel`` sends the controller a request for each job of its command
line; but a cancel never waits: others may be waiting for the node. Nothing here ever waits: what
there is no token for is not asked for yet.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from scavenger.batch.calls import CallLog

POLL_REQUESTS = 5
"""What a poll of Slurm sends: squeue and sinfo two each, scontrol one."""
BURST = 30
"""Requests at one moment: the bucket that Slurm's rl_enable gives each user by default."""
RESERVE = 2 * POLL_REQUESTS + BURST / 3
"""What has to be there for a poll out of turn: with one for each event there would never be
anything left for leases.
"""
LEASES_RATE = 0.5
"""Requests a second that are left for leases where polls alone would use up the budget."""


class TokenBucket:
    """``rate`` tokens come back each second, up to ``burst``. Safe to use from threads."""

    def __init__(
        self,
        rate: float,
        burst: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rate = rate
        self.burst = max(1.0, burst)
        self._clock = clock
        self._tokens = self.burst
        self._at = clock()
        self._lock = threading.Lock()

    @property
    def whole(self) -> int:
        """Tokens that can be taken now without waiting."""
        with self._lock:
            self._refill()
            return max(0, math.floor(self._tokens + 1e-9))

    def missing_s(self, count: float) -> float:
        """Seconds until so many tokens are there; 0: they are."""
        with self._lock:
            self._refill()
            return max(0.0, (min(count, self.burst) - self._tokens) / self.rate)

    def spend(self, count: int = 1) -> float:
        """Take tokens, those to come as well; returns the seconds until they all have come."""
        with self._lock:
            self._refill()
            self._tokens = max(self._tokens - count, -self.burst)
            return max(0.0, -self._tokens / self.rate)

    def take(self) -> bool:
        """Take a token if there is one now."""
        with self._lock:
            self._refill()
            there = self._tokens >= 1.0 - 1e-9
            self._tokens -= there
            return there

    def _refill(self) -> None:
        now = self._clock()
        self._tokens = min(self.burst, self._tokens + max(0.0, now - self._at) * self.rate)
        self._at = now


class RequestBudget:
    """Requests to a controller, in the long run ``rate`` a second, BURST at one moment. Counted are
    those of ``calls``; a poll as often as ``poll_interval_s`` is always within it. Safe to use from
    threads.
    """

    def __init__(
        self,
        calls: CallLog,
        rate: float,
        poll_interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls = calls
        self._seen = calls.requests
        self._lock = threading.Lock()
        least = POLL_REQUESTS / poll_interval_s + LEASES_RATE
        self._bucket = TokenBucket(max(rate, least), BURST, clock)

    @property
    def room(self) -> int:
        """Requests that may be made now beside another poll."""
        self._settle()
        return max(0, self._bucket.whole - POLL_REQUESTS)

    @property
    def poll_after_s(self) -> float:
        """Seconds after which a poll out of turn is within the budget, and leases beside it."""
        self._settle()
        return self._bucket.missing_s(RESERVE)

    def _settle(self) -> None:
        with self._lock:
            spent = self._calls.requests
            self._bucket.spend(spent - self._seen)
            self._seen = spent
