"""First come, first served: one queue, no limit. Pure."""

from __future__ import annotations

from collections import OrderedDict

from llmserve.generation import GenerationRequest, RequestRefusal
from llmserve.policies.interface import Load


class Fcfs:
    """Requests are posted in the order in which they came."""

    def __init__(self) -> None:
        self._queue: OrderedDict[str, GenerationRequest] = OrderedDict()

    def admit(self, request: GenerationRequest, load: Load, now: float) -> RequestRefusal | None:
        """Every request is admitted."""
        return None

    def enqueue(self, request: GenerationRequest, now: float) -> None:
        """Queue a request behind the others."""
        self._queue[request.name] = request

    def head(self, now: float) -> GenerationRequest | None:
        """Return the oldest request."""
        return next(iter(self._queue.values()), None)

    def take(self, request: GenerationRequest) -> None:
        """The request leaves the queue."""
        del self._queue[request.name]

    def begin(self, request: GenerationRequest, now: float) -> None:
        """Nothing is charged."""

    def withdraw(self, request: GenerationRequest) -> None:
        """The request ends before it was posted."""
        self._queue.pop(request.name, None)

    def generated(self, request: GenerationRequest, count: int) -> None:
        """Nothing is charged."""

    def ended(self, request: GenerationRequest, generated: int, now: float) -> None:
        """Nothing is counted."""
