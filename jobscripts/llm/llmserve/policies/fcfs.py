"""First come, first served: one queue, no limit. Pure."""

from __future__ import annotations

from collections import OrderedDict

from llmserve.generation import GenerationRequest, RequestRefusal
from llmserve.policies.interface import Load


class Fcfs:
    """Posts requests in the order of their arrival."""

    def __init__(self) -> None:
        self._queue: OrderedDict[str, GenerationRequest] = OrderedDict()

    def admit(self, request: GenerationRequest, load: Load, now: float) -> RequestRefusal | None:
        """Admit every request."""
        return None

    def enqueue(self, request: GenerationRequest, now: float) -> None:
        """Queue a request behind the others."""
        self._queue[request.name] = request

    def head(self, now: float) -> GenerationRequest | None:
        """Return the oldest request."""
        return next(iter(self._queue.values()), None)

    def take(self, request: GenerationRequest) -> None:
        """Remove the request from the queue."""
        del self._queue[request.name]

    def begin(self, request: GenerationRequest, now: float) -> None:
        """Charge nothing."""

    def withdraw(self, request: GenerationRequest) -> None:
        """Remove a request that ends before it was posted."""
        self._queue.pop(request.name, None)

    def generated(self, request: GenerationRequest, count: int) -> None:
        """Charge nothing."""

    def ended(self, request: GenerationRequest, generated: int, now: float) -> None:
        """Count nothing."""
