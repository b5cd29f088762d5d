"""``/v1/files`` and ``/v1/batches`` of the OpenAI API."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.datastructures import UploadFile
from starlette.types import Message

from llmserve.batch_lines import check_endpoint, read_lines
from llmserve.gateway.access import Access
from llmserve.gateway.admission import Admission
from llmserve.gateway.app import read_limited
from llmserve.gateway.batch_runner import BatchRunner
from llmserve.gateway.database import GatewayDatabase, StoredBatch, StoredFile
from llmserve.gateway.responses import json_response
from llmserve.openai_messages import ApiRefusal

FORM_BYTES = 64 << 10
"""Maximum size of a form without its file, bytes."""
MAX_PAGE = 100
"""Maximum number of entries in one answer."""
MAX_CREATE_BYTES = 64 << 10
"""Maximum size of the description of a batch, bytes."""


class _Create(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


def batch_router(
    access: Access,
    admission: Admission,
    database: GatewayDatabase,
    runner: BatchRunner,
    max_file_bytes: int,
) -> APIRouter:
    """Return the routes.

    Args:
        access: checks the keys of users.
        admission: with the models.
        database: the database with files and batches.
        runner: answers batches.
        max_file_bytes: maximum size of an uploaded file.
    """
    router = APIRouter(prefix="/v1")

    @router.post("/files")
    async def upload(request: Request) -> Response:
        caller = access.caller(request.headers)
        name, purpose, content = await _uploaded(request, max_file_bytes)
        file = await asyncio.to_thread(database.add_file, caller.user, name, purpose, content)
        return json_response(file.view())

    @router.get("/files")
    async def files(request: Request) -> Response:
        caller = access.caller(request.headers)
        stored = await asyncio.to_thread(database.files, caller.user)
        purpose = request.query_params.get("purpose")
        return _page(request, [file for file in stored if purpose in (None, file.purpose)])

    @router.get("/files/{file_id}")
    async def file(request: Request, file_id: str) -> Response:
        caller = access.caller(request.headers)
        stored = await asyncio.to_thread(database.file, caller.user, file_id)
        if stored is None:
            raise _no("file", file_id)
        return json_response(stored.view())

    @router.delete("/files/{file_id}")
    async def delete_file(request: Request, file_id: str) -> Response:
        caller = access.caller(request.headers)
        if not await asyncio.to_thread(database.delete_file, caller.user, file_id):
            raise _no("file", file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    @router.get("/files/{file_id}/content")
    async def content(request: Request, file_id: str) -> Response:
        caller = access.caller(request.headers)
        stored = await asyncio.to_thread(database.content, caller.user, file_id)
        if stored is None:
            raise _no("file", file_id)
        return Response(stored, media_type="application/octet-stream")

    @router.post("/batches")
    async def create(request: Request) -> Response:
        caller = access.caller(request.headers)
        body = await read_limited(request, MAX_CREATE_BYTES)
        try:
            order = msgspec.json.decode(body, type=_Create)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiRefusal(400, f"The body is wrong: {error}.", "invalid_body") from None
        check_endpoint(order.endpoint)
        text = await asyncio.to_thread(database.content, caller.user, order.input_file_id)
        if text is None:
            raise _no("file", order.input_file_id)
        lines = await asyncio.to_thread(read_lines, text, order.endpoint, admission.models)
        batch = await asyncio.to_thread(
            database.add_batch,
            caller.user,
            caller.application,
            order.endpoint,
            order.input_file_id,
            order.completion_window,
            lines,
            order.metadata or {},
        )
        runner.begin(batch)
        return json_response(batch.view())

    @router.get("/batches")
    async def batches(request: Request) -> Response:
        caller = access.caller(request.headers)
        return _page(request, await asyncio.to_thread(database.batches, caller.user))

    @router.get("/batches/{batch_id}")
    async def batch(request: Request, batch_id: str) -> Response:
        caller = access.caller(request.headers)
        stored = await asyncio.to_thread(database.batch, caller.user, batch_id)
        if stored is None:
            raise _no("batch", batch_id)
        return json_response(stored.view())

    @router.post("/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> Response:
        caller = access.caller(request.headers)
        stored = await asyncio.to_thread(database.begin_cancel, caller.user, batch_id)
        if stored is None:
            raise _no("batch", batch_id)
        runner.cancel(batch_id)
        return json_response(stored.view())

    return router


def _no(kind: str, name: str) -> ApiRefusal:
    return ApiRefusal(404, f"You have no {kind} {name}.", "not_found")


def _page(request: Request, stored: Sequence[StoredFile] | Sequence[StoredBatch]) -> Response:
    """Return a part of a list: ``limit`` entries after the one named by ``after``."""
    after, limit = request.query_params.get("after"), request.query_params.get("limit", "")
    names = [each.id for each in stored]
    start = names.index(after) + 1 if after in names else 0
    count = min(MAX_PAGE, int(limit)) if limit.isdigit() and int(limit) else MAX_PAGE
    page = stored[start : start + count]
    return json_response(
        {
            "object": "list",
            "data": [each.view() for each in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": start + count < len(stored),
        }
    )


async def _uploaded(request: Request, limit: int) -> tuple[str, str, bytes]:
    """Return name, purpose and content of the file of a form."""
    size = 0

    async def receive() -> Message:
        nonlocal size
        message = await request.receive()
        size += len(message.get("body", b""))
        if size > limit + FORM_BYTES:
            raise _too_long(limit)
        return message

    form: Any = await Request(request.scope, receive).form(max_files=1)
    try:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile) or purpose != "batch":
            sentence = "The form needs a `file` and `purpose` batch; send both."
            raise ApiRefusal(400, sentence, "invalid_form")
        content = await file.read()
        if len(content) > limit:
            raise _too_long(limit)
        return file.filename or "file.jsonl", "batch", content
    finally:
        await form.close()


def _too_long(limit: int) -> ApiRefusal:
    sentence = f"The file is longer than {limit} bytes; split it."
    return ApiRefusal(413, sentence, "file_too_long")
