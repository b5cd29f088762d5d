"""Builds the application: API, page and guard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware

from malletrain import __version__
from malletrain.client import ClientError, Connection
from malletrain.render.follow import Look
from malletrain.submission.error import SpecError
from malletrain.web.api import API, Routes, WebRefusal, reply
from malletrain.web.board import Board, HarvestView
from malletrain.web.daemon_connections import ConnectionPool
from malletrain.web.guard import AccessPolicy, WebGuard
from malletrain.web.poller import Poller
from malletrain.web.schema import ApiProblem, describe

STATIC = Path(__file__).parent / "static"
STATUS = {"usage": 400, "unreachable": 503, "internal": 500}
"""Error code of the daemon → HTTP status; 409 for other codes."""


def make_app(connect: Callable[[], Connection], policy: AccessPolicy, home: Path) -> FastAPI:
    """Return the application of one page.

    Args:
        connect: opens a connection to the daemon.
        policy: decides who is admitted.
        home: the state directory with this user's sweeps.

    Returns:
        The application. ``state.end()`` ends its streams.

    """
    board, connections = Board(policy.own), ConnectionPool(connect)
    loop: asyncio.AbstractEventLoop | None = None

    def tell(look: Look, harvest: HarvestView | None) -> None:
        def take() -> None:
            if board.machine.away:
                connections.close_idle()
            board.look(look, harvest)

        _later(take)

    def away(sentence: str) -> None:
        _later(lambda: board.away(sentence))

    def _later(function: Callable[[], object]) -> None:
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(function)

    poller = Poller(connect, tell, away)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        nonlocal loop
        loop = asyncio.get_running_loop()
        poller.start()
        try:
            yield
        finally:
            poller.end()
            connections.close()

    app = FastAPI(
        title="MalleTrain",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{API}/openapi.json",
        lifespan=lifespan,
        # Submitted data are private, even if the environment enables telemetry.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.end = board.end
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    app.include_router(Routes(board, poller, connections, home).router)
    app.mount("/", StaticFiles(directory=STATIC, html=True))
    app.add_exception_handler(ClientError, _client_error)
    app.add_exception_handler(WebRefusal, _refusal)
    app.add_exception_handler(SpecError, _spec_error)
    app.add_exception_handler(RequestValidationError, _form_error)
    app.add_exception_handler(HTTPException, _http_error)
    # Streams are not compressed; the rest of the page becomes small.
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=1)
    app.add_middleware(WebGuard, policy=policy)
    return app


async def _client_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ClientError)
    return reply(ApiProblem(str(error), error.code), STATUS.get(error.code, 409))


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, WebRefusal)
    return reply(ApiProblem(str(error), error.code), error.status)


async def _spec_error(request: Request, error: Exception) -> Response:
    return reply(ApiProblem(str(error), "usage"), 400)


async def _form_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [
        f"{'.'.join(str(part) for part in each['loc'][1:]) or 'the body'}: {each['msg']}"
        for each in error.errors()
    ]
    return reply(ApiProblem(f"The request is malformed: {'; '.join(problems)}.", "usage"), 400)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    missing = error.status_code == 404
    sentence = "There is nothing at this path." if missing else f"{error.detail}."
    response = reply(ApiProblem(sentence, "usage"), error.status_code)
    response.headers.update(error.headers or {})
    return response
