"""A limit of requests per minute and user, and first come, first served among the admitted
requests. Pure. The limit applies even if the replicas are idle, so that unused capacity is lost.
Gateways use this policy, and the others are compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.generation import GenerationRequest, RequestRefusal
from llmserve.policies.fcfs import Fcfs
from llmserve.policies.interface import Load
from llmserve.policies.throttle import SlidingWindow


class RequestsPerMinute:
    """Admits at most ``limit`` requests of one user in any minute.

    Args:
        limit: requests per minute and user, at least 1.
        users: other limits of single users.
    """

    def __init__(self, limit: int, users: Mapping[str, int] | None = None) -> None:
        self._queue = Fcfs()
        self._limit, self._limits = limit, dict(users or {})
        self._windows: dict[str, SlidingWindow] = {}

    def admit(self, request: GenerationRequest, load: Load, now: float) -> RequestRefusal | None:
        """Refuse a request beyond the limit of its user."""
        window = self._windows.get(request.user)
        if window is None:
            limit = self._limits.get(request.user, self._limit)
            window = self._windows[request.user] = SlidingWindow(limit)
        wait_s = window.wait_s(now)
        if wait_s > 0:
            return window.refusal("requests_per_minute", f"user {request.user}", wait_s)
        window.count(now)
        return None

    def enqueue(self, request: GenerationRequest, now: float) -> None:
        """Queue a request behind the others."""
        self._queue.enqueue(request, now)

    def head(self, now: float) -> GenerationRequest | None:
        """Return the oldest request."""
        return self._queue.head(now)

    def take(self, request: GenerationRequest) -> None:
        """Remove the request from the queue."""
        self._queue.take(request)

    def begin(self, request: GenerationRequest, now: float) -> None:
        """Charge nothing."""

    def withdraw(self, request: GenerationRequest) -> None:
        """Remove a request that ends before it was posted."""
        self._queue.withdraw(request)

    def generated(self, request: GenerationRequest, count: int) -> None:
        """Charge nothing."""

    def ended(self, request: GenerationRequest, generated: int, now: float) -> None:
        """Count nothing."""
