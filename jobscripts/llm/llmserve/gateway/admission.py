"""Admits requests, and observes and interrupts those that have not ended. Knows no HTTP."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from llmserve.answers import AnswerResult, AnswerStream
from llmserve.gateway.access import Access, Caller
from llmserve.gateway.configuration import GatewayConfiguration
from llmserve.gateway.metrics import GatewayMetrics
from llmserve.gateway.models import GatewayOrder, ServedModel
from llmserve.generation import RequestRefusal
from llmserve.openai_messages import ApiRefusal
from llmserve.states import RequestState

REVOKED_CHECK_S = 0.5
"""Seconds between two checks whether keys of open requests are revoked."""
OPEN_RETRY_S = 5.0
"""Seconds after which a user with too many open requests may try again."""

Observer = Callable[["OpenRequest", AnswerResult], None]


@dataclass(eq=False)
class OpenRequest:
    """A request that was admitted."""

    name: str
    caller: Caller
    gateway_order: GatewayOrder
    stream: AnswerStream
    observe_tbt: Callable[[float], None]
    """Called with the seconds between two tokens."""
    interruption: ApiRefusal | None = None
    """Why the gateway has ended it; None: the gateway has not."""

    @property
    def model(self) -> ServedModel:
        """The model that answers it."""
        return self.gateway_order.model

    @property
    def party(self) -> tuple[str, str, str]:
        """Its model, user and application, for metrics."""
        return (self.model.name, self.caller.user, self.caller.application)


class Admission:
    """The open requests of a gateway.

    Args:
        configuration: the operator's configuration.
        access: checks the keys of users.
        models: name → model.
        clock: seconds.
    """

    def __init__(
        self,
        configuration: GatewayConfiguration,
        access: Access,
        models: Mapping[str, ServedModel],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.models = dict(models)
        self.metrics = GatewayMetrics(models.values(), self._parties)
        self.observers: list[Observer] = []
        """Called with each request that has ended."""
        self._limit = configuration.limits.open_requests
        self._access, self._clock = access, clock
        self._open: dict[str, OpenRequest] = {}
        self._counts: Counter[str] = Counter()
        """User → number of open requests."""
        self._wakers: list[Callable[[ServedModel], None]] = []
        self._stops: ApiRefusal | None = None

    def on_wait(self, wake: Callable[[ServedModel], None]) -> None:
        """Call ``wake`` whenever a request arrives that no replica can answer now."""
        self._wakers.append(wake)

    async def admit(self, gateway_order: GatewayOrder, caller: Caller) -> OpenRequest:
        """Submit a request.

        Raises:
            ApiRefusal: a limit is exceeded, or the request fits no replica; with status 503, the
                gateway is stopping.
        """
        if self._stops is not None:
            raise self._stops
        model, order = gateway_order.model, gateway_order.order
        party = (model.name, caller.user, caller.application)
        if self._counts[caller.user] >= self._limit:
            sentence = (
                f"The limit of {self._limit} open requests of user {caller.user} is reached; send "
                "the request again when others have ended."
            )
            self._refuse(party, RequestRefusal("open_requests", sentence, OPEN_RETRY_S))
        name = f"{'chatcmpl' if order.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        request = order.request(
            name,
            caller.user,
            caller.application,
            interaction=caller.interaction,
            ends_interaction=caller.ends_interaction,
        )
        if order.continuable:
            stream = model.dispatcher.submit(request, order.parameters)
        else:
            stream = model.dispatcher.submit_body(request, order.path, order.body)
        now = self._clock()
        observe_tbt = self.metrics.tbt.labels(*party).observe
        opened = OpenRequest(name, caller, gateway_order, stream, observe_tbt)
        refusal = (await stream.result()).refusal if stream.has_ended else None
        if refusal is not None:
            self._refuse(party, refusal)
        model.demand.arrived(now)
        self._open[name] = opened
        self._counts[caller.user] += 1
        stream.on_end(lambda result: self._observe(opened, result))
        if not model.has_ready_replica:
            for wake in self._wakers:
                wake(model)
        return opened

    def interrupt(self, requests: Iterable[OpenRequest], reason: ApiRefusal) -> None:
        """End requests before they are answered."""
        for opened in list(requests):
            if opened.interruption is None:
                opened.interruption = reason
                opened.stream.cancel()

    def stop(self) -> None:
        """End all requests, and admit no more: the gateway is stopping."""
        sentence = "The gateway is stopping; send the request again later."
        self._stops = ApiRefusal(503, sentence, "gateway_stops")
        self.interrupt(self._open.values(), self._stops)

    async def watch_keys(self) -> None:
        """End requests whose keys are revoked, until it is cancelled."""
        reason = ApiRefusal(401, "The key of this request was revoked.", "invalid_api_key")
        while True:
            keys = {opened.caller.key for opened in self._open.values()}
            revoked = {key for key in keys if key and self._access.is_revoked(key)}
            if revoked:
                self.interrupt((o for o in self._open.values() if o.caller.key in revoked), reason)
            await asyncio.sleep(REVOKED_CHECK_S)

    def open_counts(self) -> dict[str, tuple[int, int]]:
        """Return user → (number of requests that wait, number of those that run)."""
        waiting: Counter[str] = Counter()
        running: Counter[str] = Counter()
        for model, user, _, name in self._parties():
            is_running = model.dispatcher.state(name) is RequestState.RUNNING
            (running if is_running else waiting)[user] += 1
        return {user: (waiting[user], running[user]) for user in {*waiting, *running}}

    def __len__(self) -> int:
        """Number of open requests."""
        return len(self._open)

    def _parties(self) -> Iterator[tuple[ServedModel, str, str, str]]:
        for name, opened in list(self._open.items()):
            yield (opened.model, opened.caller.user, opened.caller.application, name)

    def _refuse(self, party: tuple[str, str, str], refusal: RequestRefusal) -> None:
        self.metrics.refusals.labels(*party, refusal.limit).inc()
        self.metrics.requests.labels(*party, "refused").inc()
        raise limit_refusal(refusal)

    def _observe(self, opened: OpenRequest, result: AnswerResult) -> None:
        """Record that a request has ended."""
        del self._open[opened.name]
        self._counts[opened.caller.user] -= 1
        if not self._counts[opened.caller.user]:
            del self._counts[opened.caller.user]
        metrics, party = self.metrics, opened.party
        metrics.requests.labels(*party, str(result.state)).inc()
        if result.refusal is not None:
            metrics.refusals.labels(*party, result.refusal.limit).inc()
        metrics.tokens.labels(*party, "prompt").inc(result.prompt_tokens)
        metrics.tokens.labels(*party, "generated").inc(len(result.ids))
        metrics.moves.labels(*party).inc(max(0, result.attempts - 1))
        first_at = result.first_token_at
        if first_at is not None:
            metrics.ttft.labels(*party).observe(max(0.0, first_at - result.submitted_at))
            if result.state is RequestState.DONE:
                opened.model.demand.answered(result.ended_at - first_at, self._clock())
        for observer in self.observers:
            observer(opened, result)


def limit_refusal(refusal: RequestRefusal) -> ApiRefusal:
    """Return the error for a request that exceeds a limit."""
    status = 400 if refusal.retry_after_s is None else 429
    answer = ApiRefusal(status, refusal.sentence, refusal.limit)
    answer.retry_after_s = refusal.retry_after_s
    return answer
