"""The metrics for Prometheus: times of tokens, the queue and moves, by model, user and
application.
"""

from __future__ import annotations

from collections import Counter as Counting
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmserve.gateway.models import ServedModel
from llmserve.states import RequestState

PARTY = ("model", "user", "application")
TTFT_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
TBT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

OpenRequests = Callable[[], Iterable[tuple[ServedModel, str, str, str]]]
"""Returns (model, user, application, name) of each request that has not ended."""


class _Now(Collector):
    """Collects the current values when they are read."""

    def __init__(self, models: Iterable[ServedModel], open_requests: OpenRequests) -> None:
        self._models, self._open_requests = list(models), open_requests

    def collect(self) -> Iterator[Metric]:
        counts: Counting[tuple[str, str, str, str]] = Counting()
        for model, user, application, name in self._open_requests():
            state = model.dispatcher.state(name)
            if state is not None:
                waits = state is not RequestState.RUNNING
                counts[model.name, user, application, "queued" if waits else "running"] += 1
        requests = GaugeMetricFamily(
            "llmserve_open_requests", "Requests that wait or run", labels=[*PARTY, "state"]
        )
        for labels, count in counts.items():
            requests.add_metric(labels, count)
        yield requests
        replicas = GaugeMetricFamily(
            "llmserve_replicas", "Replicas by state", labels=["model", "state"]
        )
        queue = GaugeMetricFamily(
            "llmserve_queue_length", "Requests that wait for a replica", labels=["model"]
        )
        for served in self._models:
            queue.add_metric([served.name], served.dispatcher.load.queued)
            states = Counting(str(view.state) for view in served.dispatcher.replicas())
            for name, count in states.items():
                replicas.add_metric([served.name, name], count)
        yield queue
        yield replicas


class GatewayMetrics:
    """The metrics of one gateway.

    Args:
        models: that it serves.
        open_requests: returns the requests that have not ended.
    """

    def __init__(self, models: Iterable[ServedModel], open_requests: OpenRequests) -> None:
        registry = self._registry = CollectorRegistry()
        registry.register(_Now(models, open_requests))
        self.requests = Counter(
            "llmserve_requests", "Requests by outcome", (*PARTY, "outcome"), registry=registry
        )
        self.refusals = Counter(
            "llmserve_refusals", "Refused requests by limit", (*PARTY, "limit"), registry=registry
        )
        self.tokens = Counter(
            "llmserve_tokens", "Tokens of ended requests", (*PARTY, "kind"), registry=registry
        )
        self.moves = Counter(
            "llmserve_moves",
            "Attempts after the first: replicas that left or were lost",
            PARTY,
            registry=registry,
        )
        self.ttft = Histogram(
            "llmserve_time_to_first_token_seconds",
            "From arrival to the first token",
            PARTY,
            registry=registry,
            buckets=TTFT_BUCKETS,
        )
        self.tbt = Histogram(
            "llmserve_time_between_tokens_seconds",
            "Of streams",
            PARTY,
            registry=registry,
            buckets=TBT_BUCKETS,
        )

    def text(self) -> bytes:
        """Return all of them in Prometheus' text format."""
        return generate_latest(self._registry)
