"""The request rate to the main scheduler: one token bucket for submissions and cancels of jobs, one
for all requests to its controller.

Decides how many requests may be made now. Each submission takes a token. So does each cancelled
job, because ``scancel`` sends the controller one request per job. But a cancel never waits, because
another job may wait for the node. Nothing in this module waits: if there is no token, the request
is not made yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from scavenger.batch.calls import CallLog
from scavenger.token_bucket import TokenBucket

POLL_REQUESTS = 5
"""Number of requests of a poll of Slurm: two each for squeue and sinfo, one for scontrol."""
BURST = 30
"""Maximum number of requests at one time: the bucket size of Slurm's rl_enable for each user by
default.
"""
RESERVE = 2 * POLL_REQUESTS + BURST / 3
"""Minimum number of tokens for an additional poll. Otherwise a poll for each event would leave no
tokens for leases.
"""
LEASES_RATE = 0.5
"""Requests per second that are reserved for leases if regular polls alone would use up the budget.
"""


class RequestBudget:
    """The budget of requests to a controller: ``rate`` per second on average, BURST at one time. It
    counts the requests of ``calls``. Polls at ``poll_interval_s`` are always within the budget.
    Safe to use from several threads.
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
        min_rate = POLL_REQUESTS / poll_interval_s + LEASES_RATE
        self._bucket = TokenBucket(max(rate, min_rate), BURST, clock)

    @property
    def room(self) -> int:
        """Number of requests that may be made now in addition to a poll."""
        self._settle()
        return max(0, self._bucket.available - POLL_REQUESTS)

    @property
    def poll_after_s(self) -> float:
        """Seconds after which an additional poll, and leases with it, fit the budget."""
        self._settle()
        return self._bucket.missing_s(RESERVE)

    def _settle(self) -> None:
        with self._lock:
            spent = self._calls.requests
            self._bucket.spend(spent - self._seen)
            self._seen = spent
