"""The lines of a batch: checked before any node is asked for, and answers to them. Pure.

A batch is refused as a whole, with the line, for what makes its answers ambiguous or is no request.
A line that is a request but cannot be answered (too long, say) becomes a line of the error file.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from llmserve.client_bodies import PATHS
from llmserve.openai_messages import ApiRefusal


@dataclass(frozen=True)
class LineRequest:
    """One request of a batch."""

    custom_id: str
    model: str
    body: bytes
    """JSON of the request."""


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Body(msgspec.Struct):
    model: str
    stream: bool | None = False


def read_lines(content: bytes, endpoint: str, models: Collection[str]) -> list[LineRequest]:
    """Returns the requests of a file.

    Args:
        content: JSON lines.
        endpoint: path that all of them must have.
        models: names of the models that are served.

    Raises:
        ApiRefusal: a line is broken; the sentence names its number.
    """
    lines: list[LineRequest] = []
    number_of: dict[str, int] = {}
    for number, text in _numbered(content):
        line = _read(number, text, endpoint, models)
        first = number_of.setdefault(line.custom_id, number)
        if first != number:
            raise _wrong(
                number, f"custom_id {line.custom_id!r} is that of line {first} too", "duplicate_id"
            )
        lines.append(line)
    if not lines:
        raise ApiRefusal(400, "The file has no lines; a batch needs one request.", "empty_file")
    return lines


def _numbered(content: bytes) -> Iterator[tuple[int, bytes]]:
    for number, text in enumerate(content.split(b"\n"), 1):
        if text.strip():
            yield number, text


def _read(number: int, text: bytes, endpoint: str, models: Collection[str]) -> LineRequest:
    try:
        line = msgspec.json.decode(text, type=_Line)
        body = msgspec.json.decode(line.body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _wrong(number, f"it is no request: {error}", "invalid_line") from None
    if not line.custom_id:
        raise _wrong(number, "custom_id is empty", "missing_id")
    if line.url != endpoint or line.method != "POST":
        what = f"it is {line.method} {line.url}, and the batch is POST {endpoint}"
        raise _wrong(number, what, "mismatched_url")
    if body.model not in models:
        what = f"there is no model {body.model!r}; served: {', '.join(sorted(models))}"
        raise _wrong(number, what, "model_not_found")
    if body.stream:
        raise _wrong(number, "stream is true; answers of a batch are not streamed", "stream")
    return LineRequest(line.custom_id, body.model, bytes(line.body))


def _wrong(number: int, what: str, code: str) -> ApiRefusal:
    sentence = f"Line {number}: {what}. Correct the file, and upload it again."
    return ApiRefusal(400, sentence, code)


def check_endpoint(endpoint: str) -> None:
    """Raise ApiRefusal for a path that batches do not have."""
    if endpoint not in PATHS:
        sentence = f"A batch has no requests to {endpoint!r}; possible: {', '.join(PATHS)}."
        raise ApiRefusal(400, sentence, "invalid_endpoint")


def answer_line(custom_id: str, body: dict[str, Any]) -> bytes:
    """Returns the line of the output file for an answer."""
    return _line(custom_id, 200, body)


def error_line(custom_id: str, refusal: ApiRefusal) -> bytes:
    """Returns the line of the error file for a request without an answer."""
    return _line(custom_id, refusal.status, refusal.body())


def _line(custom_id: str, status: int, body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(
        {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": {"status_code": status, "request_id": body.get("id", ""), "body": body},
            "error": None,
        }
    )
