"""The front of a replica: an HTTP proxy that checks the bearer token and forwards requests to the
engine's socket.

``/replica`` returns the status of the replica. Everything else is forwarded unchanged, and so are
the answers. If the engine ends, its requests get an error with the code ``engine_ended``; in a
stream the error is the last event. An engine that has loaded and answers ``/health`` with an error,
or not at all, is ended.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from llmserve.credentials import is_authorized
from llmserve.openai_messages import MAX_BODY_BYTES, ApiRefusal
from llmserve.replica_status import ENGINE_ENDED, ENGINE_LOADS, ReplicaStatus
from llmserve.states import ReplicaState

CHUNK_BYTES = 1 << 16
HOP_HEADERS = frozenset(
    ("connection", "content-length", "keep-alive", "server", "date", "transfer-encoding")
)
"""Headers of the engine's answer that are not forwarded, because they belong to one connection."""


class Front:
    """The front of one replica.

    Args:
        token: bearer token of requests; empty: they need none.
        engine: socket of the engine.
        status: returns the status of the replica.
        engine_ended: called after a connection to the engine broke. Waits until it is known whether
            the engine has ended; returns its last lines, empty if it has not ended.
        end_engine: ends an unhealthy engine; returns a sentence, empty if it has not loaded yet.
    """

    def __init__(
        self,
        token: str,
        engine: Path,
        status: Callable[[], ReplicaStatus],
        engine_ended: Callable[[], Awaitable[str]],
        end_engine: Callable[[], str],
    ) -> None:
        self._token = token
        self._engine = engine
        self._status = status
        self._engine_ended = engine_ended
        self._end_engine = end_engine
        self._running = 0
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def running(self) -> int:
        """Number of requests that the engine is answering."""
        return self._running

    async def start(self, listener: socket.socket) -> None:
        """Serve on a bound socket."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(self._engine), limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/replica", self._answer_status)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()

    async def close(self) -> None:
        """Close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _answer_status(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        body = msgspec.json.encode(self._status())
        return web.Response(body=body, content_type="application/json")

    def _refusal(self, request: web.Request) -> web.Response | None:
        header = request.headers.get("Authorization", "")
        if self._token and not is_authorized(header, self._token):
            return _error(ApiRefusal(401, "The bearer token is missing or wrong.", "invalid_token"))
        return None

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        status = self._status()
        if status.state == ReplicaState.FAILED:
            return _error(ApiRefusal(502, status.sentence, ENGINE_ENDED))
        if status.state == ReplicaState.LOADING:
            return _error(
                ApiRefusal(503, "The model is being loaded; try again later.", ENGINE_LOADS)
            )
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            sentence = f"The body is longer than {MAX_BODY_BYTES >> 20} MiB."
            return _error(ApiRefusal(413, sentence, "body_too_long"))
        self._running += 1
        try:
            return await self._relay(request, body)
        finally:
            self._running -= 1

    async def _relay(self, request: web.Request, body: bytes) -> web.StreamResponse:
        assert self._session is not None
        response: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method,
                f"http://localhost{request.rel_url}",
                data=body or None,
                headers={"Content-Type": request.headers.get("Content-Type", "application/json")},
            ) as answer:
                is_unwell = request.path == "/health" and answer.status >= 500
                if is_unwell and (sentence := self._end_engine()):
                    return _error(ApiRefusal(502, sentence, ENGINE_ENDED))
                response = web.StreamResponse(status=answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in HOP_HEADERS:
                        response.headers[name] = value
                await response.prepare(request)
                async for data in answer.content.iter_any():
                    await response.write(data)
        except aiohttp.ClientError as error:
            if request.path == "/health":
                self._end_engine()
            refusal = await self._broken(str(error) or type(error).__name__)
            if response is None:
                return _error(refusal)
            with contextlib.suppress(ConnectionError):  # the client may have disconnected, too
                await response.write(b"\n\ndata: " + msgspec.json.encode(refusal.body()) + b"\n\n")
        await response.write_eof()
        return response

    async def _broken(self, text: str) -> ApiRefusal:
        """Return the error for a request whose connection to the engine broke."""
        sentence = await self._engine_ended()
        if sentence:
            return ApiRefusal(502, sentence, ENGINE_ENDED)
        return ApiRefusal(502, f"The engine closed the connection: {text}.", "broken")


def _error(refusal: ApiRefusal) -> web.Response:
    return web.Response(
        status=refusal.status,
        body=msgspec.json.encode(refusal.body()),
        content_type="application/json",
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket for a front.

    Args:
        host: address of this node.
        port: 0: any.

    Raises:
        OSError: it cannot be opened.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
