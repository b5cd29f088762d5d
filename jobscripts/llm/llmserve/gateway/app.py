"""The OpenAI API of the gateway: ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions``, and
``/metrics``. Files and batches: ``batch_api``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from llmserve.client_bodies import CHAT, COMPLETIONS
from llmserve.gateway.access import Access
from llmserve.gateway.admission import Admission
from llmserve.gateway.configuration import GatewayConfiguration
from llmserve.gateway.models import read_order
from llmserve.gateway.responses import json_response, refusal_response, respond
from llmserve.openai_messages import ApiRefusal

Background = Callable[[], Awaitable[None]]
"""Runs as long as the application does."""


def make_app(
    configuration: GatewayConfiguration,
    access: Access,
    admission: Admission,
    background: Sequence[Background] = (),
    routers: Sequence[APIRouter] = (),
) -> FastAPI:
    """Return the application.

    Args:
        configuration: the operator's configuration.
        access: checks the keys of users.
        admission: the open requests and the models.
        background: what runs beside it; started and cancelled with it.
        routers: further routes.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        work = (admission.watch_keys, *background)
        tasks = [asyncio.ensure_future(each()) for each in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    app = FastAPI(title="LLM gateway", lifespan=lifespan, openapi_url=None)

    @app.exception_handler(ApiRefusal)
    async def refuse(_: Request, refusal: ApiRefusal) -> Response:
        return refusal_response(refusal)

    @app.exception_handler(HTTPException)
    async def no_such(request: Request, error: HTTPException) -> Response:
        sentence, code = f"{error.detail}.", "invalid_request"
        if error.status_code in (404, 405):
            sentence, code = f"There is no {request.method} {request.url.path}.", "not_found"
        refusal = ApiRefusal(error.status_code, sentence, code)
        return JSONResponse(refusal.body(), error.status_code, error.headers)

    async def generate(request: Request, path: str) -> Response:
        caller = access.caller(request.headers)
        body = await read_limited(request, configuration.max_body_bytes)
        gateway_order = read_order(body, path, admission.models)
        opened = await admission.admit(gateway_order, caller)
        return await respond(request, opened, configuration.comment_interval_s)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        access.caller(request.headers)
        return json_response(
            {"object": "list", "data": [_model(name) for name in sorted(admission.models)]}
        )

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        access.caller(request.headers)
        if name not in admission.models:
            raise ApiRefusal(404, f"There is no model {name!r}.", "model_not_found")
        return json_response(_model(name))

    @app.post(COMPLETIONS)
    async def completions(request: Request) -> Response:
        return await generate(request, COMPLETIONS)

    @app.post(CHAT)
    async def chat_completions(request: Request) -> Response:
        return await generate(request, CHAT)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        caller = access.caller(request.headers)
        if caller.user not in configuration.metrics_for:
            sentence = f"metrics_for does not name user {caller.user}; ask the operator."
            raise ApiRefusal(403, sentence, "forbidden")
        return Response(
            admission.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    for router in routers:
        app.include_router(router)
    return app


async def read_limited(request: Request, limit: int) -> bytes:
    """Return the body of a request.

    Args:
        request: a client's HTTP request.
        limit: maximum size, bytes.

    Raises:
        ApiRefusal: it is longer (413).
    """
    length = request.headers.get("content-length", "")
    parts, size = [], int(length) if length.isdigit() else 0
    if size <= limit:
        size = 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > limit:
                break
    if size > limit:
        sentence = f"The body is longer than {limit} bytes; send less at once."
        raise ApiRefusal(413, sentence, "body_too_long")
    return b"".join(parts)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "llmserve"}
