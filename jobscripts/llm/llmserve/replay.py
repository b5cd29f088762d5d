"""Sends the requests of a trace to an OpenAI endpoint at their times, and measures the answers.

Prompts have the lengths and the common prefixes of the trace; their ids are made up. Answers are
streams of exactly the length in the trace (``ignore_eos``).
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from llmserve.traces import TraceRequest

FIRST_ID = 10
"""First id that prompts use: ids below it are often special tokens."""


@dataclass(frozen=True)
class Endpoint:
    """Where requests go."""

    url: str
    """URL of the endpoint, without ``/v1``."""
    model: str
    keys: Sequence[str] = ("",)
    """Keys. The users of the trace get them in turn, in the order of their first requests."""
    vocabulary: int = 32_000
    """Number of token ids of the model."""


@dataclass(frozen=True)
class ReplayOutcome:
    """The outcome of one request."""

    user: str
    sent_at: float
    """Time from the beginning of the replay, seconds, as the following times."""
    ended_at: float
    first_at: float | None = None
    """Time of the first token; None: there was none."""
    tokens: int = 0
    error: str = ""
    """What went wrong; empty: it was answered."""


@dataclass
class ReplaySummary:
    """Figures of a replay. Times in seconds."""

    requests: int
    answered: int
    refused: int
    """Answers with status 429."""
    failed: int
    seconds: float
    tokens_per_s: float
    ttft: dict[str, float] = field(default_factory=dict)
    """Time to the first token: ``p50``, ``p90`` and ``p99``."""
    tbt: dict[str, float] = field(default_factory=dict)
    """Mean time between two tokens of an answer: percentiles over the answers."""
    errors: dict[str, int] = field(default_factory=dict)
    """Error → number of requests."""


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Return p50, p90 and p99 by the nearest rank; empty without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        f"p{percent}": ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]
        for percent in (50, 90, 99)
    }


def summarize(outcomes: Sequence[ReplayOutcome]) -> ReplaySummary:
    """Return the figures of a replay."""
    answered = [outcome for outcome in outcomes if not outcome.error]
    errors: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error:
            errors[outcome.error] = errors.get(outcome.error, 0) + 1
    refused = sum(count for error, count in errors.items() if error.startswith("429"))
    seconds = max((outcome.ended_at for outcome in outcomes), default=0.0)
    tokens = sum(outcome.tokens for outcome in outcomes)
    return ReplaySummary(
        len(outcomes),
        len(answered),
        refused,
        len(outcomes) - len(answered) - refused,
        seconds,
        tokens / seconds if seconds else 0.0,
        percentiles(o.first_at - o.sent_at for o in answered if o.first_at is not None),
        percentiles(
            (o.ended_at - o.first_at) / (o.tokens - 1)
            for o in answered
            if o.first_at is not None and o.tokens > 1
        ),
        errors,
    )


def body_of(request: TraceRequest, number: int, endpoint: Endpoint) -> dict[str, Any]:
    """Return the body of a request of a trace.

    Args:
        request: a request of the trace.
        number: its number; ids outside the common prefixes depend on it.
        endpoint: the endpoint.
    """
    span = max(1, endpoint.vocabulary - FIRST_ID)
    return {
        "model": endpoint.model,
        "prompt": [FIRST_ID + token % span for token in request.prompt(number)],
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def replay(
    requests: Sequence[TraceRequest],
    endpoint: Endpoint,
    speed: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
) -> list[ReplayOutcome]:
    """Send requests at their times. Return their outcomes in the order of the trace.

    Args:
        requests: requests with their times from the beginning of the trace.
        endpoint: the endpoint.
        speed: factor by which the requests are sent faster; infinite: all at once.
        clock: seconds.
    """
    begin = clock()
    key_of: dict[str, str] = {}
    for request in requests:
        key_of.setdefault(request.user, endpoint.keys[len(key_of) % len(endpoint.keys)])
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def send(number: int, request: TraceRequest) -> ReplayOutcome:
            body = body_of(request, number, endpoint)
            await asyncio.sleep(max(0.0, begin + request.time / speed - clock()))
            key = key_of[request.user]
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            sent_at = clock() - begin
            first_at, tokens, error = None, 0, ""
            try:
                async with session.post(
                    f"{endpoint.url}/v1/completions", json=body, headers=headers
                ) as answer:
                    if answer.status != 200:
                        error = f"{answer.status} {_error(await answer.read())}"
                    async for line in answer.content:
                        if not line.startswith(b"data: {"):
                            continue
                        if first_at is None:
                            first_at = clock() - begin
                        event = msgspec.json.decode(line[6:])
                        error = error or str((event.get("error") or {}).get("message", ""))
                        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            except (aiohttp.ClientError, OSError) as failure:
                error = f"{type(failure).__name__}: {failure}"
            if error:
                first_at = None
            return ReplayOutcome(request.user, sent_at, clock() - begin, first_at, tokens, error)

        return list(
            await asyncio.gather(*(send(number, each) for number, each in enumerate(requests)))
        )


def _error(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "error"
