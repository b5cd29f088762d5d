"""Decides how many nodes the requests of a model need now, and so what nodes are worth. Pure.

The nodes are enough for the requests that wait and run, and for the expected number of concurrent
requests: (arrivals per second) times (seconds of an answer), by Little's law. So nodes also stay
for requests that come one after another. Additional nodes become valuable at once. Nodes lose their
value only after ``scale_down_s``, because a released node has to load the model again. The nodes
that a service has at the start of the gateway count as filled then. After ``idle_s`` without
requests no node is worth anything, and the service releases all of them. The next request makes one
node valuable again.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

RATE_WINDOW_S = 60.0
"""Time constant of the rate of arrivals, seconds: a request of that age has the weight 1/e."""
ANSWER_STEP = 0.1
"""Weight of the newest answer in the average duration, after the first ten answers."""


@dataclass(frozen=True)
class DemandLimits:
    """The operator's settings in ``[scaling]``."""

    idle_s: float
    """Seconds without requests after which no node is worth anything."""
    node_value: float
    """Value of a node that requests fill, samples/s."""
    requests_per_node: float
    """Number of concurrent requests that a node answers without delay."""
    max_nodes: int
    scale_down_s: float = 0.0
    """Seconds for which nodes keep their worth after requests have filled them."""


class Demand:
    """The requests of one model.

    Times are seconds on the clock of the caller and do not decrease.

    Args:
        limits: the limits that the operator sets.
        now: the time.
        nodes: number of nodes that the service of the model has. They count as filled now: a
            restart of the gateway releases none before the requests have come back.
    """

    def __init__(self, limits: DemandLimits, now: float, nodes: int = 0) -> None:
        self._limits = limits
        self._rate = 0.0
        """Requests/s at :attr:`_rate_at`."""
        self._rate_at = now
        self._answers = 0
        self._answer_s = 0.0
        """Average seconds of an answer from its first token."""
        self._last_used = now
        self._filled: deque[tuple[float, int]] = deque()
        """(time, number of nodes that requests filled), with descending numbers: an entry is
        dropped when a later one is at least as large.
        """
        if nodes:
            self._filled.append((now, nodes))

    def arrived(self, now: float) -> None:
        """Count a request that was accepted."""
        self._rate = self.rate(now) + 1 / RATE_WINDOW_S
        self._rate_at = self._last_used = now

    def answered(self, seconds: float, now: float) -> None:
        """Count an answer.

        Args:
            seconds: its duration, without the wait for a replica.
            now: the time.
        """
        self._last_used = now
        self._answers += 1
        step = max(ANSWER_STEP, 1 / self._answers)
        self._answer_s += step * (seconds - self._answer_s)

    def rate(self, now: float) -> float:
        """Return the requests that arrive per second."""
        return self._rate * math.exp(-(now - self._rate_at) / RATE_WINDOW_S)

    def nodes(self, open_requests: int, now: float) -> int:
        """Return the number of nodes that the requests need, or needed within ``scale_down_s``.

        Args:
            open_requests: number of requests that wait or run.
            now: the time.
        """
        if open_requests:
            self._last_used = now
        if now - self._last_used >= self._limits.idle_s:
            self._filled.clear()
            return 0
        expected = max(float(open_requests), self.rate(now) * self._answer_s)
        needed = max(1, math.ceil(expected / self._limits.requests_per_node - 1e-9))
        while self._filled and self._filled[-1][1] <= needed:
            self._filled.pop()
        self._filled.append((now, needed))
        while len(self._filled) > 1 and self._filled[0][0] <= now - self._limits.scale_down_s:
            self._filled.popleft()
        return min(self._filled[0][1], self._limits.max_nodes)

    def values(self, open_requests: int, now: float) -> dict[int, float]:
        """Return what nodes are worth: number of nodes → samples/s, as
        ``malletrain.Client.worth`` takes it.

        Args:
            open_requests: number of requests that wait or run.
            now: the time.
        """
        needed, largest = self.nodes(open_requests, now), self._limits.max_nodes
        value = self._limits.node_value
        return {size: value * min(size, needed) for size in sorted({1, max(1, needed), largest})}
