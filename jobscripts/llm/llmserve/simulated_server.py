"""The simulated engine as an HTTP server with the OpenAI API, for demos and tests.

    python -m llmserve.simulated_server --socket engine.sock --model simulated

It serves ``/v1/models``, ``/v1/completions`` (text or ids) and ``/v1/chat/completions``, both with
streams, and ``/health``, which answers 503 until the model is loaded. With ``return_token_ids`` an
answer contains its ids; a prompt that ends with these ids continues an interrupted answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import stat
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse

from llmserve.engine_model import EngineTimes
from llmserve.live_engine import LiveEngine
from llmserve.openai_messages import (
    MAX_BODY_BYTES,
    AnswerShape,
    ApiRefusal,
    GenerationOrder,
    read_order,
)
from llmserve.replicas import Capacity
from llmserve.simulated_model import detokenize

FAST = EngineTimes(step_s=0.002, prompt_token_s=1e-6, request_s=1e-5, kv_token_s=0.0)
"""Times of an engine for demos: 500 tokens per second for each answer."""


class AnswerText:
    """The text of a stream: half a character is held back until its other half is generated."""

    def __init__(self) -> None:
        self._pending: list[int] = []
        self.count = 0
        """Number of ids so far."""

    def add(self, ids: Sequence[int], complete: int, *, is_last: bool) -> str:
        """Add ids, and return the text that is complete now and was not returned before.

        Args:
            ids: further ids, in order.
            complete: number of them up to the last one after which the text is complete.
            is_last: whether no ids follow.
        """
        self.count += len(ids)
        shown = len(ids) if is_last else complete
        text = detokenize([*self._pending, *ids[:shown]]) if shown else ""
        self._pending = list(ids[shown:]) if shown else [*self._pending, *ids]
        return text


def make_app(engine: LiveEngine, model: str, load_s: float = 0.0) -> FastAPI:
    """Return the application of one engine.

    Args:
        engine: computes while the application runs.
        model: name of the model.
        load_s: seconds until it answers.
    """
    ready = asyncio.Event()

    async def load() -> None:
        await asyncio.sleep(load_s)
        ready.set()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(engine.run()), asyncio.create_task(load())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    app = FastAPI(title="Simulated engine", lifespan=lifespan, openapi_url=None)

    async def order_of(request: Request, *, is_chat: bool) -> GenerationOrder:
        if not ready.is_set():
            raise ApiRefusal(503, "The model is being loaded; try again later.", "loading")
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                sentence = f"The body is longer than {MAX_BODY_BYTES >> 20} MiB."
                raise ApiRefusal(413, sentence, "body_too_long")
        return read_order(body, is_chat=is_chat, model=model, kv_tokens=engine.capacity.kv_tokens)

    async def answer(request: Request, *, is_chat: bool) -> Response:
        try:
            order = await order_of(request, is_chat=is_chat)
        except ApiRefusal as refusal:
            return _json(refusal.body(), refusal.status)
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        shape = AnswerShape(name, int(time.time()), model, order)
        if order.stream:
            return StreamingResponse(_events(engine, shape), media_type="text/event-stream")
        whole = await _until_disconnect(request, _whole(engine, shape))
        return Response(status_code=499) if whole is None else _json(whole)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if ready.is_set() else 503)

    @app.get("/v1/models")
    async def models() -> Response:
        entry = {"id": model, "object": "model", "created": 0, "owned_by": "llmserve"}
        return _json({"object": "list", "data": [entry]})

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, is_chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, is_chat=True)

    return app


def _json(value: dict[str, Any], status: int = 200) -> Response:
    body = msgspec.json.encode(value)
    return Response(body, status_code=status, media_type="application/json")


async def _whole(engine: LiveEngine, shape: AnswerShape) -> dict[str, Any]:
    ids: list[int] = []
    reports = engine.generate(shape.order.ids, shape.order.max_tokens)
    async with contextlib.aclosing(reports):
        async for report in reports:
            ids += report.ids
    return shape.whole(detokenize(ids), ids)


async def _events(engine: LiveEngine, shape: AnswerShape) -> AsyncIterator[bytes]:
    """Yield the events of a stream. The iterator is closed when the client disconnects, which stops
    the attempt.
    """
    text, is_first = AnswerText(), True
    reports = engine.generate(shape.order.ids, shape.order.max_tokens)
    async with contextlib.aclosing(reports):
        async for report in reports:
            part = text.add(report.ids, report.complete, is_last=report.is_last)
            ids = list(report.ids)
            reason = "length" if report.is_last else None
            yield _event(shape.chunk(part, ids, is_first=is_first, reason=reason))
            is_first = False
    if shape.order.include_usage:
        yield _event(shape.usage_chunk(text.count))
    yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def _until_disconnect(request: Request, answer: Any) -> dict[str, Any] | None:
    """Return the answer. If the client disconnects before, cancel the attempt and return None."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(answer), asyncio.ensure_future(disconnected())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def listen(path: Path) -> socket.socket:
    """Return a Unix socket to which only this user may connect. A socket that an earlier process
    left behind is replaced.

    Raises:
        OSError: the path is too long, is another file, or cannot be created.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(f"{path} exists and is not a socket; name another path.")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(mask)
    return listener


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = options.add_mutually_exclusive_group(required=True)
    where.add_argument("--socket", type=Path, metavar="PATH", help="Unix socket to listen on")
    where.add_argument("--port", type=int, help="port of 127.0.0.1 to listen on")
    options.add_argument("--model", default="simulated")
    options.add_argument("--load-s", type=float, default=0.0, help="seconds until it answers")
    options.add_argument("--slots", type=int, default=64)
    options.add_argument("--kv-tokens", type=int, default=65_536)
    options.add_argument(
        "--step-s", type=float, default=FAST.step_s, help="duration of an iteration, seconds"
    )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; return an exit code."""
    options = parser().parse_args(arguments)
    times = EngineTimes(options.step_s, FAST.prompt_token_s, FAST.request_s, FAST.kv_token_s)
    try:
        capacity = Capacity(options.slots, options.kv_tokens)
    except ValueError as error:
        sys.exit(f"simulated_server: {error}")

    async def serve() -> None:
        app = make_app(LiveEngine(times, capacity), options.model, options.load_s)
        config = uvicorn.Config(
            app,
            host="127.0.0.1",
            port=options.port or 0,
            log_level="warning",
            timeout_graceful_shutdown=1,
        )
        sockets = None if options.socket is None else [listen(options.socket)]
        await uvicorn.Server(config).serve(sockets=sockets)

    try:
        asyncio.run(serve())
    except OSError as error:
        sys.exit(f"simulated_server: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
