"""Makes the overview that the page shows: models, replicas, users, batches and errors, as far as
the caller may see them.

A user sees the sums of each model, and the user's own requests and batches. Operators, the users in
``metrics_for``, see everything: their keys can read the same from ``/metrics``.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
from prometheus_client import Counter as PrometheusCounter

from llmserve.answers import AnswerResult
from llmserve.gateway.access import Caller
from llmserve.gateway.admission import Admission, OpenRequest
from llmserve.gateway.batch_runner import BatchRunner
from llmserve.gateway.configuration import GatewayConfiguration
from llmserve.gateway.database import GatewayDatabase, StoredBatch
from llmserve.gateway.models import ServedModel
from llmserve.gateway.recent import (
    AnswerTimes,
    LatencySummary,
    RecentActivity,
    by_user,
    latencies,
    mean_token_s,
)
from llmserve.live_status import ReplicaView
from llmserve.states import RequestState

LOOK_S = 1.0
"""Seconds between two checks of the replicas. An error that lasts less may be missed."""
BATCHES_S = 3.0
"""Seconds for which batches are not read again: counting their lines takes time."""
LATENCIES_S = 5.0
"""Seconds for which latencies are not computed again."""
MAX_BATCHES = 30
"""Maximum number of batches that are shown: the newest ones."""
MAX_USERS = 200
"""Maximum number of users that are shown: those with most generated tokens."""


class ReplicaOverview(msgspec.Struct, frozen=True):
    """One replica, for operators."""

    name: str
    """Its node."""
    address: str
    state: str
    running: int
    slots: int
    load_s: float | None
    sentence: str


class ModelOverview(msgspec.Struct, frozen=True):
    """One model: the sums over all users."""

    name: str
    job: str
    """Its service; empty: its engines have fixed addresses."""
    states: dict[str, int]
    """State → number of replicas."""
    queued: int
    running: int
    slots: int
    """Maximum number of concurrent requests of the ready replicas."""
    backlog: int
    """Lines of batches that wait to become requests."""
    tokens_per_s: float
    node_demand: int | None
    """Number of nodes that the requests need; None: its engines have fixed addresses."""
    moves: int
    """Number of attempts since the start that were moved because their replica was leaving."""
    losses: int
    """Number of attempts since the start that were lost with their replica."""
    latencies: LatencySummary
    replicas: list[ReplicaOverview]
    """Empty for users who are not operators."""


class UserOverview(msgspec.Struct, frozen=True):
    """The requests of one user, since the start of the gateway."""

    name: str
    queued: int
    running: int
    done: int
    failed: int
    cancelled: int
    refused: dict[str, int]
    """Limit → number of requests that it refused."""
    prompt_tokens: int
    generated_tokens: int
    latencies: LatencySummary


class BatchOverview(msgspec.Struct, frozen=True):
    """One batch."""

    id: str
    user: str
    status: str
    total: int
    completed: int
    failed: int
    created: float
    """Time of its creation, seconds since the epoch."""
    ended: float | None
    """Time of its end, seconds since the epoch; None: it has not ended."""


class ErrorOverview(msgspec.Struct, frozen=True):
    """An error of its engine that a replica reported."""

    ago_s: float
    model: str
    replica: str
    sentence: str


class GatewayOverview(msgspec.Struct, frozen=True):
    """Everything that a caller may see."""

    user: str
    operator: bool
    policy: str
    now: float
    """Present time, seconds since the epoch."""
    started: float
    """Time of the gateway's start, seconds since the epoch."""
    models: list[ModelOverview]
    users: list[UserOverview]
    batches: list[BatchOverview]
    errors: list[ErrorOverview]
    """Empty for users who are not operators."""


class Overviews:
    """Makes overviews of a running gateway.

    Args:
        configuration: the operator's configuration.
        admission: the open requests and the models.
        runner: the runner of batches.
        database: the database with the batches.
        clock: returns seconds that do not decrease.
    """

    def __init__(
        self,
        configuration: GatewayConfiguration,
        admission: Admission,
        runner: BatchRunner,
        database: GatewayDatabase,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._configuration, self._admission = configuration, admission
        self._runner, self._database, self._clock = runner, database, clock
        self._recent = RecentActivity()
        self._started = time.time()
        self._last_batches: dict[str, tuple[float, list[BatchOverview]]] = {}
        """User, or empty for all users → (time of reading, batches)."""
        self._computing = asyncio.Lock()
        self._latencies_at = -math.inf
        self._of_models: dict[str, LatencySummary] = {}
        self._of_users: dict[str, LatencySummary] = {}
        admission.observers.append(self._observe)

    async def run(self) -> None:
        """Check the replicas until it is cancelled."""
        while True:
            self.record()
            await asyncio.sleep(LOOK_S)

    def record(self) -> None:
        """Record the errors of replicas and the number of generated tokens."""
        now = self._clock()
        for model in self._admission.models.values():
            dispatcher = model.dispatcher
            self._recent.add_tokens(model.name, dispatcher.counts().generated_tokens, now)
            sentences = {view.name: view.sentence for view in dispatcher.replicas()}
            self._recent.add_sentences(model.name, sentences, now)

    async def of(self, caller: Caller) -> GatewayOverview:
        """Return what a caller may see."""
        operates = caller.user in self._configuration.metrics_for
        user = "" if operates else caller.user
        batches = await self._batches(user)
        await self._compute_latencies()
        now = self._clock()
        return GatewayOverview(
            caller.user,
            operates,
            self._configuration.policy,
            time.time(),
            self._started,
            self._models(now, with_replicas=operates),
            self._users(now, user),
            batches,
            [
                ErrorOverview(now - error.time, error.model, error.replica, error.sentence)
                for error in (self._recent.errors() if operates else ())
            ],
        )

    def _observe(self, opened: OpenRequest, result: AnswerResult) -> None:
        """Record that a request has ended."""
        first_at = result.first_token_at
        if first_at is None or result.state is not RequestState.DONE:
            return
        self._recent.add_answer(
            AnswerTimes(
                opened.model.name,
                opened.caller.user,
                self._clock(),
                max(0.0, first_at - result.submitted_at),
                mean_token_s(first_at, result.ended_at, len(result.ids)),
            )
        )

    async def _batches(self, user: str) -> list[BatchOverview]:
        """Return the newest batches of a user, or of all users if ``user`` is empty."""
        looked_at, batches = self._last_batches.get(user, (-math.inf, []))
        if self._clock() - looked_at >= BATCHES_S:
            stored = await asyncio.to_thread(self._database.newest_batches, MAX_BATCHES, user)
            batches = [_batch(batch) for batch in stored]
            self._last_batches[user] = (self._clock(), batches)
        return batches

    async def _compute_latencies(self) -> None:
        """Up to :data:`llmserve.gateway.recent.MAX_ANSWERS` answers: in a thread, beside the
        streams of the loop.
        """
        async with self._computing:
            now = self._clock()
            if now - self._latencies_at < LATENCIES_S:
                return
            answers = self._recent.answers(now)
            self._of_models, self._of_users = await asyncio.to_thread(
                lambda: (
                    latencies(answers, lambda answer: answer.model),
                    latencies(answers, lambda answer: answer.user),
                )
            )
            self._latencies_at = now

    def _models(self, now: float, *, with_replicas: bool) -> list[ModelOverview]:
        return [
            self._model(model, now, self._of_models.get(name, LatencySummary()), with_replicas)
            for name, model in self._admission.models.items()
        ]

    def _model(
        self, model: ServedModel, now: float, summary: LatencySummary, with_replicas: bool
    ) -> ModelOverview:
        dispatcher = model.dispatcher
        views, counts = dispatcher.replicas(), dispatcher.counts()
        job, backlog = self._configuration.models[model.name].job, self._runner.backlog(model.name)
        return ModelOverview(
            model.name,
            job,
            dict(Counter(str(view.state) for view in views)),
            counts.queued,
            counts.running,
            dispatcher.load.slots,
            backlog,
            self._recent.tokens_per_s(model.name),
            model.demand.nodes(model.open_requests + backlog, now) if job else None,
            counts.moves,
            counts.losses,
            summary,
            [_replica(view) for view in views] if with_replicas else [],
        )

    def _users(self, now: float, only: str) -> list[UserOverview]:
        """Return all users with requests; if ``only`` is not empty, that user alone, even without
        requests.
        """
        metrics = self._admission.metrics
        outcomes = by_user(_samples(metrics.requests, "outcome"))
        refusals = by_user(_samples(metrics.refusals, "limit"))
        tokens = by_user(_samples(metrics.tokens, "kind"))
        open_counts = self._admission.open_counts()
        names = {only} if only else {*outcomes, *refusals, *tokens, *open_counts}
        rows = []
        for name in sorted(names):
            queued, running = open_counts.get(name, (0, 0))
            ends, kinds = outcomes.get(name, {}), tokens.get(name, {})
            rows.append(
                UserOverview(
                    name,
                    queued,
                    running,
                    ends.get("done", 0),
                    ends.get("failed", 0),
                    ends.get("cancelled", 0),
                    refusals.get(name, {}),
                    kinds.get("prompt", 0),
                    kinds.get("generated", 0),
                    self._of_users.get(name, LatencySummary()),
                )
            )
        return sorted(rows, key=lambda row: -row.generated_tokens)[:MAX_USERS]


def _samples(counter: PrometheusCounter, kind: str) -> Iterator[tuple[str, str, float]]:
    """(user, value of the label ``kind``, count) of each child of a counter."""
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                yield sample.labels["user"], sample.labels[kind], sample.value


def _replica(view: ReplicaView) -> ReplicaOverview:
    return ReplicaOverview(
        view.name,
        view.address,
        str(view.state),
        view.running,
        view.slots,
        view.load_s,
        view.sentence,
    )


def _batch(batch: StoredBatch) -> BatchOverview:
    return BatchOverview(
        batch.id,
        batch.user,
        batch.status,
        batch.total,
        batch.completed,
        batch.failed,
        batch.created,
        batch.ended,
    )
