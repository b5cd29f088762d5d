"""The application: API, page and guard put together."""

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
from malletrain.web.calls import Calls
from malletrain.web.guard import AccessPolicy, WebGuard
from malletrain.web.poller import Poller
from malletrain.web.schema import ApiProblem, describe

STATIC = Path(__file__).parent / "static"
STATUS = {"usage": 400, "unreachable": 503, "internal": 500}
"""Status of what the daemon says; anything else is 409."""


def make_app(connect: Callable[[], Connection], policy: AccessPolicy, home: Path) -> FastAPI:
    """The application of one page. ``connect`` makes clients of the daemon; ``home``: the state
    directory with this user's sweeps. ``state.end()`` has those leave who follow it.
    """
    board, calls = Board(policy.own), Calls(connect)
    loop: asyncio.AbstractEventLoop | None = None

    def tell(look: Look, harvest: HarvestView | None) -> None:
        def take() -> None:
            if board.machine.away:
                calls.renew()
            board.look(look, harvest)

        _later(take)

    def away(sentence: str) -> None:
        _later(lambda: board.away(sentence))

    def _later(what: Callable[[], object]) -> None:
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(what)

    poller = Poller(connect, tell, away)

    @asynccontextmanager
    async def living(app: FastAPI) -> AsyncIterator[None]:
        nonlocal loop
        loop = asyncio.get_running_loop()
        poller.start()
        try:
            yield
        finally:
            poller.end()
            calls.close()

    app = FastAPI(
        title="MalleTrain",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{API}/openapi.json",
        lifespan=living,
        # What people submit is nobody else's business, whatever the environment asks for.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.end = board.end
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    app.include_router(Routes(board, poller, calls, home).router)
    app.mount("/", StaticFiles(directory=STATIC, html=True))
    app.add_exception_handler(ClientError, _client_error)
    app.add_exception_handler(WebRefusal, _refusal)
    app.add_exception_handler(SpecError, _spec_error)
    app.add_exception_handler(RequestValidationError, _form_error)
    app.add_exception_handler(HTTPException, _http_error)
    # Streams are left as they are; the rest of the page is small when it is packed.
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
    return reply(
        ApiProblem(f"The request is not of its form: {'; '.join(problems)}.", "usage"), 400
    )


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        sentence = "There is nothing of this name here."
    else:
        sentence = f"{error.detail}."
    made = reply(ApiProblem(sentence, "usage"), error.status_code)
    made.headers.update(error.headers or {})
    return made
