"""The client of a replica: what an error of an engine means, which is asked whether it is well."""

from __future__ import annotations

import asyncio
import functools

import pytest
from aiohttp import web
from llmserve.replica_client import EngineCrash, EngineRefusal, ReplicaClient

from tests.jobscripts.llm.test_live_dispatcher import run

SENTENCE = "The scheduler has raised an exception."


async def well(request: web.Request) -> web.Response:
    return web.Response()


async def unwell(request: web.Request) -> web.Response:
    return web.Response(status=503)


async def busy(request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def silent(request: web.Request) -> web.Response:
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize(
    ("status", "health", "error"),
    [
        (500, well, EngineRefusal),
        (500, busy, EngineRefusal),
        (500, silent, EngineRefusal),
        (500, unwell, EngineCrash),
        (400, unwell, EngineRefusal),  # an error of the request: it is not asked
    ],
)
@run
async def test_an_error_keeps_its_sentence_whatever_the_engine_says_of_itself(
    tmp_path, monkeypatch, status, health, error
):
    async def fail(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": SENTENCE, "code": status}}, status=status)

    if health is busy:
        impatient = functools.partialmethod(ReplicaClient.is_healthy, timeout_s=0.05)
        monkeypatch.setattr(ReplicaClient, "is_healthy", impatient)
    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post("/v1/completions", fail)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "engine")).start()
    client = ReplicaClient(f"unix:{tmp_path}/engine")
    with pytest.raises(error, match=f"^{SENTENCE}$"):
        await client.whole("/v1/completions", {"prompt": [1]})
    with pytest.raises(error, match=f"^{SENTENCE}$"):
        await anext(client.generate({"prompt": [1]}))
    await client.close()
    await runner.cleanup()
