"""The HTTP responses of the gateway: whole answers, and streams of events.

A stream begins with its first token, or with a comment if there is none for an interval. An error
before that has its own HTTP status; an error after that is the last event of the stream. If the
client disconnects, its request is cancelled.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llmserve.answers import AnswerPart, AnswerResult
from llmserve.gateway.admission import OpenRequest, limit_refusal
from llmserve.generation import FinishReason
from llmserve.openai_messages import AnswerShape, ApiRefusal, GenerationOrder
from llmserve.states import RequestState

COMMENT = b": waiting\n\n"
"""Sent in a stream without new tokens: clients skip it, and proxies keep the connection."""
DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499
"""Status of an answer whose client has disconnected, as in nginx."""

T = TypeVar("T")


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an answer in JSON."""
    body = msgspec.json.encode(value)
    return Response(body, status, headers, media_type="application/json")


def refusal_response(refusal: ApiRefusal) -> Response:
    """Return the response to a refused request, with the headers that clients need to retry."""
    headers = {}
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if refusal.status == 429:
        headers["X-Limit"] = refusal.code
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(refusal.retry_after_s)))
    elif refusal.status == 502:
        headers["X-Should-Retry"] = "false"  # the gateway has retried already
    return json_response(refusal.body(), refusal.status, headers)


def failure(opened: OpenRequest, result: AnswerResult) -> ApiRefusal | None:
    """Return why a request has no complete answer; None if it has one."""
    if opened.interruption is not None:
        return opened.interruption
    if result.state is RequestState.DONE:
        return None
    if result.refusal is not None:
        return limit_refusal(result.refusal)
    if 400 <= result.engine_status < 500:
        return ApiRefusal(result.engine_status, result.sentence, "engine_refused")
    if result.state is RequestState.FAILED:
        return ApiRefusal(502, result.sentence, "failed")
    return ApiRefusal(CLIENT_GONE, "The request was cancelled.", "cancelled")


async def unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of ``work``. If the client disconnects before, cancels ``work`` and
    returns None.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def respond(request: Request, opened: OpenRequest, comment_interval_s: float) -> Response:
    """Return the answer to an admitted request.

    Args:
        request: the client's HTTP request.
        opened: the admitted request.
        comment_interval_s: seconds without a token after which a stream gets a comment.
    """
    shape = _shape(opened)
    answer: Awaitable[Response]
    if opened.gateway_order.order.stream:
        answer = _stream(opened, shape, comment_interval_s)
    else:
        answer = _whole(opened, shape)
    begun = False
    try:
        response = await unless_gone(request, answer)
        begun = response is not None
    finally:
        if not begun:
            opened.stream.cancel()
    return Response(status_code=CLIENT_GONE) if response is None else response


async def answer_body(opened: OpenRequest) -> dict[str, Any]:
    """Return the body of an answer that is not streamed.

    Raises:
        ApiRefusal: there is none.
    """
    return _body(_shape(opened), opened, await opened.stream.result())


def _shape(opened: OpenRequest) -> AnswerShape:
    order = opened.gateway_order.order
    shape_order = GenerationOrder(
        order.prompt,
        order.max_tokens,
        order.stream,
        order.include_usage,
        order.return_token_ids,
        order.is_chat,
    )
    return AnswerShape(opened.name, int(time.time()), opened.model.name, shape_order)


async def _whole(opened: OpenRequest, shape: AnswerShape) -> Response:
    try:
        return json_response(_body(shape, opened, await opened.stream.result()))
    except ApiRefusal as refusal:
        return refusal_response(refusal)


def _body(shape: AnswerShape, opened: OpenRequest, result: AnswerResult) -> dict[str, Any]:
    refusal = failure(opened, result)
    if refusal is not None:
        raise refusal
    if result.body is not None:
        return {**result.body, "id": shape.name, "model": shape.model}
    return shape.whole(result.text, list(result.ids), str(result.reason))


async def _stream(opened: OpenRequest, shape: AnswerShape, comment_interval_s: float) -> Response:
    parts = answer_parts(opened, comment_interval_s)
    first = await anext(parts, None)
    if first is None:  # it has ended
        refusal = failure(opened, await opened.stream.result())
        if refusal is not None:
            return refusal_response(refusal)
    events = _events(opened, shape, first, parts)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    end = BackgroundTask(opened.stream.cancel)  # also if no event was requested
    return StreamingResponse(
        events, media_type="text/event-stream", headers=headers, background=end
    )


async def answer_parts(opened: OpenRequest, interval_s: float) -> AsyncGenerator[AnswerPart, None]:
    """Yield the parts of an answer, and an empty one for each interval without any.

    Args:
        opened: its time between tokens is observed: once for the tokens of a part.
        interval_s: seconds.
    """
    stream, loop = opened.stream, asyncio.get_running_loop()
    is_silent, last_at = True, 0.0
    timer: asyncio.TimerHandle

    def end_silence() -> None:
        nonlocal is_silent, timer
        if is_silent:
            stream.add(AnswerPart("", ()))
        is_silent = True
        timer = loop.call_later(interval_s, end_silence)

    timer = loop.call_later(interval_s, end_silence)
    try:
        async for part in stream:
            if part.ids:
                is_silent, now = False, time.monotonic()
                if last_at:
                    opened.observe_tbt((now - last_at) / len(part.ids))
                last_at = now
            yield part
    finally:
        timer.cancel()


async def _events(
    opened: OpenRequest,
    shape: AnswerShape,
    first: AnswerPart | None,
    parts: AsyncGenerator[AnswerPart, None],
) -> AsyncIterator[bytes]:
    """Yield the events of a stream. The iterator is closed when the client disconnects, which
    cancels the request.
    """
    with_ids, is_first = shape.order.return_token_ids, True
    try:
        part: AnswerPart | None = first
        while part is not None:
            if part.text or (part.ids and with_ids):
                ids = list(part.ids) if with_ids else []
                yield _event(shape.chunk(part.text, ids, is_first=is_first, reason=None))
                is_first = False
            elif not part.ids:
                yield COMMENT
            part = await anext(parts, None)
        result = await opened.stream.result()
        refusal = failure(opened, result)
        if refusal is not None:
            yield _event(refusal.body())
        elif result.body is not None:
            for chunk in whole_as_chunks({**result.body, "id": shape.name, "model": shape.model}):
                yield _event(chunk)
        else:
            reason = str(result.reason or FinishReason.STOP)
            yield _event(shape.chunk("", [], is_first=is_first, reason=reason))
        if refusal is None and shape.order.include_usage:
            chunk = shape.usage_chunk(len(result.ids))
            yield _event({**chunk, **usage_of(result.body)})
        yield DONE
    finally:
        opened.stream.cancel()
        await parts.aclose()


def whole_as_chunks(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a stream for a whole answer of an engine.

    Args:
        body: the body of the engine's answer, with all its choices.
    """
    is_chat = body.get("object") == "chat.completion"
    head = {name: value for name, value in body.items() if name not in ("choices", "usage")}
    if is_chat:
        head["object"] = "chat.completion.chunk"
    chunks = []
    for choice in body.get("choices", ()):
        part = dict(choice)
        if is_chat:
            delta = {name: value for name, value in part.pop("message", {}).items() if value}
            calls = delta.get("tool_calls")
            if calls:
                delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(calls)]
            part["delta"] = delta
        chunks.append({**head, "choices": [part]})
    return chunks


def usage_of(body: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the usage that an engine reports in its answer; empty if there is none."""
    usage = (body or {}).get("usage")
    return {"usage": usage} if usage else {}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
