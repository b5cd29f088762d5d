"""How the throughput of an engine is measured."""

import asyncio
from types import SimpleNamespace

import pytest
from llmserve import measuring
from llmserve.generation import FinishReason
from llmserve.measuring import measure_throughput
from llmserve.replica_client import EngineChunk


@pytest.mark.parametrize(
    ("chunks", "rate"),
    [
        ([(2.0, 1), *[(0.5, 1)] * 16], 2.0),  # the first token does not count
        ([(2.0, 3), (1.0, 14)], 14.0),  # three came at once
        ([(2.0, 17)], 8.5),  # all came at once: with the time until then
    ],
)
def test_tokens_per_second(monkeypatch, chunks, rate):
    now = [0.0]
    monkeypatch.setattr(measuring, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Client:
        async def generate(self, body):
            for index, (pause_s, tokens) in enumerate(chunks):
                now[0] += pause_s
                is_last = index == len(chunks) - 1
                yield EngineChunk([7] * tokens, FinishReason.LENGTH if is_last else None)

    assert asyncio.run(measure_throughput(Client(), "m", 1)) == {1: pytest.approx(rate)}
