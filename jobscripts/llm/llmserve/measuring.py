"""Measures the throughput of an engine, once after it has loaded: tokens per second by the number
of concurrent requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from llmserve.replica_client import ReplicaClient

PROMPT = tuple(range(10, 26))
"""A prompt whose ids every model has."""
TOKENS = 16
"""Number of tokens that each request generates after its first one, with which the clock starts."""


def batch_sizes(slots: int) -> list[int]:
    """Return the numbers of concurrent requests that are measured: 1, 8, 64, …, and all slots."""
    sizes, size = [], 1
    while size < slots:
        sizes.append(size)
        size *= 8
    return [*sizes, slots]


async def measure_throughput(client: ReplicaClient, model: str, slots: int) -> dict[int, float]:
    """Return number of concurrent requests → tokens per second of all of them together.

    Args:
        client: a client of an engine without other requests.
        model: its name.
        slots: maximum number of concurrent requests.

    Raises:
        EngineRefusal: the engine refuses a request.
        EngineCrash: it ended.
        ReplicaUnreachable: it cannot be reached.
    """
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": TOKENS + 1,
        "temperature": 0,
        "ignore_eos": True,
    }
    throughput = {}
    for size in batch_sizes(slots):
        rates = await asyncio.gather(*(_rate(client, body) for _ in range(size)))
        throughput[size] = sum(rates)
    return throughput


async def _rate(client: ReplicaClient, body: dict[str, Any]) -> float:
    """Tokens per second of one request, without the time to its first chunk. If there is only one
    chunk, that time is included.
    """
    started, first_at, count, later = time.monotonic(), 0.0, 0, 0
    async with contextlib.aclosing(client.generate(body)) as chunks:
        async for chunk in chunks:
            if count:
                later += len(chunk.ids)
            else:
                first_at = time.monotonic()
            count += len(chunk.ids)
    tokens, since = (later, first_at) if later else (count, started)
    return tokens / max(1e-6, time.monotonic() - since)
