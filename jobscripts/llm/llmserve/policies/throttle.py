"""Limits of requests per minute that count only while the replicas are overloaded. Pure.

The window slides: in no interval of a minute is a user above the limit. Overload begins at one
length of the queue and ends at a shorter one (hysteresis).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmserve.generation import GenerationRequest, RequestRefusal
from llmserve.policies.interface import Load

WINDOW_S = 60.0


class SlidingWindow:
    """The newest requests of one party, at most as many as the limit.

    Args:
        limit: maximum number in any :data:`WINDOW_S`, at least 1.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"A limit of {limit} requests per minute admits none; give 1 or more.")
        self._times: deque[float] = deque(maxlen=limit)
        self.limit = limit

    def wait_s(self, now: float) -> float:
        """Return the seconds until one more request is within the limit; 0 if it is now."""
        if len(self._times) < self.limit:
            return 0.0
        return max(0.0, self._times[0] + WINDOW_S - now)

    def count(self, now: float) -> None:
        """Count a request that is admitted."""
        self._times.append(now)

    def refusal(self, limit: str, party: str, wait_s: float) -> RequestRefusal:
        """Return the refusal of a request beyond the limit.

        Args:
            limit: name of the limit.
            party: whose limit it is, such as ``user alice``.
            wait_s: seconds after which a request would be admitted.
        """
        return RequestRefusal(
            limit,
            f"The limit of {self.limit} requests per minute of {party} is reached; send the "
            f"request again in {math.ceil(wait_s)} s.",
            wait_s,
        )


@dataclass(frozen=True)
class ThrottleLimits:
    """The operator's limits."""

    user: int | None = None
    """Requests per minute of each user while there is overload; None: no limit."""
    users: Mapping[str, int] = field(default_factory=dict)
    """User → limit that replaces :attr:`user` for this user."""
    applications: Mapping[str, int] = field(default_factory=dict)
    """Requests per minute of each user in an application."""
    begins_at: float = 2.0
    """Overload begins at so many queued requests for each slot."""
    ends_at: float = 1.0
    """Overload ends below so many queued requests for each slot."""

    def __post_init__(self) -> None:
        if not 0 <= self.ends_at <= self.begins_at:
            raise ValueError(
                f"Overload cannot begin at {self.begins_at:g} and end at {self.ends_at:g} queued "
                "requests per slot; it has to end at fewer."
            )


class Throttle:
    """Decides which requests are refused.

    Args:
        limits: the limits of users and applications.
    """

    def __init__(self, limits: ThrottleLimits) -> None:
        self._limits = limits
        self._windows: dict[tuple[str, str], SlidingWindow] = {}
        self.overloaded = False
        """Whether the limits count now."""

    def check(
        self, request: GenerationRequest, application: str, load: Load, now: float
    ) -> RequestRefusal | None:
        """Return why a request is refused, and count it if it is not.

        Args:
            request: a new request that continues no interaction.
            application: an application that the operator has declared; empty: none.
            load: how busy the replicas are. Without slots there is no overload: requests wait for
                the first replica.
            now: seconds on the clock of the caller.
        """
        self.observe(load)
        exceeded = [
            window.refusal(limit, party, window.wait_s(now))
            for limit, party, window in self._windows_of(request.user, application)
            if window.wait_s(now) > 0
        ]
        if exceeded and self.overloaded:
            return max(exceeded, key=lambda refusal: refusal.retry_after_s or 0.0)
        self.count(request, application, now)
        return None

    def count(self, request: GenerationRequest, application: str, now: float) -> None:
        """Count a request that is admitted."""
        for _, _, window in self._windows_of(request.user, application):
            window.count(now)

    def observe(self, load: Load) -> None:
        """Decide whether there is overload."""
        if not load.slots:
            self.overloaded = False
            return
        threshold = self._limits.ends_at if self.overloaded else self._limits.begins_at
        self.overloaded = load.queued >= max(1.0, threshold * load.slots)

    def _windows_of(self, user: str, application: str) -> list[tuple[str, str, SlidingWindow]]:
        windows = []
        limit = self._limits.users.get(user, self._limits.user)
        if limit is not None:
            window = self._window((user, ""), limit)
            windows.append(("user_requests_per_minute", f"user {user}", window))
        limit = self._limits.applications.get(application)
        if limit is not None:
            window = self._window((user, application), limit)
            party = f"user {user} in application {application}"
            windows.append(("application_requests_per_minute", party, window))
        return windows

    def _window(self, key: tuple[str, str], limit: int) -> SlidingWindow:
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = SlidingWindow(limit)
        return window
