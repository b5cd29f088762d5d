"""The models that the gateway serves. Finds the model of a request, and parses the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from llmserve.client_bodies import ClientOrder, read_client_body
from llmserve.gateway.demand import Demand
from llmserve.live_dispatcher import LiveDispatcher
from llmserve.openai_messages import ApiRefusal
from llmserve.text import Tokenizer


@dataclass(frozen=True, eq=False)
class ServedModel:
    """One model."""

    name: str
    dispatcher: LiveDispatcher
    demand: Demand
    """Decides how many nodes its requests need."""
    max_request_tokens: int | None = None
    """The operator's maximum number of tokens of prompt and answer together; None: that of the
    replicas."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self.dispatcher.tokenizer

    @property
    def request_tokens(self) -> int | None:
        """Maximum number of tokens of prompt and answer together; None: not known, because no
        replica is ready or one that is loading may hold more.
        """
        if self.max_request_tokens is not None:
            return self.max_request_tokens
        if not self.has_ready_replica or self.dispatcher.may_hold_more:
            return None
        return self.dispatcher.largest_tokens

    @property
    def has_ready_replica(self) -> bool:
        """Whether a replica answers now."""
        return self.dispatcher.load.slots > 0

    @property
    def open_requests(self) -> int:
        """Number of requests that wait or run."""
        counts = self.dispatcher.counts()
        return counts.queued + counts.running


class _Named(msgspec.Struct):
    model: str


@dataclass(frozen=True)
class GatewayOrder:
    """The parsed body of a request, and its model."""

    model: ServedModel
    order: ClientOrder


def read_order(
    body: bytes, path: str, models: Mapping[str, ServedModel], *, may_wait: bool = False
) -> GatewayOrder:
    """Parse and check a body, and find its model.

    Args:
        body: JSON.
        path: the path of the request, one of ``llmserve.client_bodies.PATHS``.
        models: name → model.
        may_wait: whether it may wait for a larger replica than there is now. Nobody waits for the
            answer to a line of a batch.

    Raises:
        ApiRefusal: it is broken or too long, or names an unknown model.
    """
    try:
        name = msgspec.json.decode(body, type=_Named).model
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiRefusal(400, f"The body is wrong: {error}.", "invalid_body") from None
    if name not in models:
        served = ", ".join(sorted(models))
        sentence = f"There is no model {name!r}; served: {served}."
        raise ApiRefusal(404, sentence, "model_not_found")
    model = models[name]
    order = read_client_body(
        body,
        path,
        models=(name,),
        tokenizer=model.tokenizer,
        max_request_tokens=model.max_request_tokens if may_wait else model.request_tokens,
    )
    return GatewayOrder(model, order)
