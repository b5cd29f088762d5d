"""The virtual token counter (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024).
Pure.

The user who has received the least service is next. The prompt is charged when its request leaves
the queue, the answer token by token. Of two users who always have requests waiting, neither gets
more than 2·max(input weight · longest prompt, output weight · KV tokens) more service than the
other in any interval (theorem 4.4).
"""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.generation import GenerationRequest, RequestRefusal
from llmserve.policies.counters import ServiceCounters
from llmserve.policies.interface import INPUT_WEIGHT, OUTPUT_WEIGHT, Load


class VirtualTokenCounter:
    """Equal service for users with equal shares, whatever they send.

    Args:
        shares: user → share of the service, relative to others; users without an entry have 1.
    """

    def __init__(self, shares: Mapping[str, float] | None = None) -> None:
        self._counters = ServiceCounters(shares)

    def admit(self, request: GenerationRequest, load: Load, now: float) -> RequestRefusal | None:
        """Admit every request."""
        return None

    def enqueue(self, request: GenerationRequest, now: float) -> None:
        """Queue a request; the counter of its user is raised to those of the users who wait."""
        self._counters.add(request)

    def head(self, now: float) -> GenerationRequest | None:
        """Return the oldest request of the user with the least service."""
        return self._counters.head()

    def take(self, request: GenerationRequest) -> None:
        """Charge the prompt."""
        self._counters.remove(request)
        self._counters.charge(request.user, INPUT_WEIGHT * len(request.prompt))

    def begin(self, request: GenerationRequest, now: float) -> None:
        """Count nothing."""

    def withdraw(self, request: GenerationRequest) -> None:
        """Refund the charge of a request that has left the queue; else remove it from its queue."""
        if not self._counters.remove(request):
            self._counters.charge(request.user, -INPUT_WEIGHT * len(request.prompt))

    def generated(self, request: GenerationRequest, count: int) -> None:
        """Charge tokens of the answer."""
        self._counters.charge(request.user, OUTPUT_WEIGHT * count)

    def ended(self, request: GenerationRequest, generated: int, now: float) -> None:
        """Count nothing."""
