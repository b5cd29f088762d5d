"""FairServe as it is printed (Khan et al., 2024): the oracle that the cases of abuse must break.

A request is charged when it ends, relative to the average of all requests of the application that
its client names. Calls of an interaction always go first. Windows of throttling begin at whole
minutes, and overload begins and ends at one length of the queue.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from llmserve.generation import GenerationRequest, RequestRefusal
from llmserve.policies.counters import ServiceCounters, UserQueues
from llmserve.policies.interface import INPUT_WEIGHT, OUTPUT_WEIGHT, Load


class PrintedFairServe:
    """As printed.

    Args:
        limit: requests per minute and user under overload.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._counters = ServiceCounters()
        self._calls = UserQueues()
        self._begun: set[tuple[str, str]] = set()
        self._averages: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        self._minutes: Counter[tuple[str, int]] = Counter()

    def admit(self, request: GenerationRequest, load: Load, now: float) -> RequestRefusal | None:
        window = (request.user, int(now // 60))
        self._minutes[window] += 1
        if (
            self._limit is None
            or self._continues(request)
            or load.queued <= load.slots
            or self._minutes[window] <= self._limit
        ):
            return None
        return RequestRefusal("requests_per_minute", "Too many requests.", 60 - now % 60)

    def enqueue(self, request: GenerationRequest, now: float) -> None:
        self._counters.add(request)
        if self._continues(request):
            self._calls.add(request)

    def head(self, now: float) -> GenerationRequest | None:
        if self._calls:
            return min(self._calls.heads().values(), key=lambda head: head[0])[1]
        return self._counters.head()

    def take(self, request: GenerationRequest) -> None:
        self._counters.remove(request)
        self._calls.discard(request)

    def begin(self, request: GenerationRequest, now: float) -> None:
        if request.interaction:
            self._begun.add((request.user, request.interaction))
        if request.ends_interaction:
            self._begun.discard((request.user, request.interaction))

    def withdraw(self, request: GenerationRequest) -> None:
        self._counters.remove(request)
        self._calls.discard(request)

    def generated(self, request: GenerationRequest, count: int) -> None:
        pass

    def ended(self, request: GenerationRequest, generated: int, now: float) -> None:
        service = INPUT_WEIGHT * len(request.prompt) + OUTPUT_WEIGHT * generated
        average = self._averages[request.application]
        average[0] += 1
        average[1] += (service - average[1]) / average[0]
        self._counters.charge(request.user, service / average[1])

    def _continues(self, request: GenerationRequest) -> bool:
        return (request.user, request.interaction) in self._begun
