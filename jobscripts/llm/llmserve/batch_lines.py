"""The lines of a batch in the format of the OpenAI batch API: reads a line, and checks all lines of
a batch before a node is requested. Pure.

A batch is refused as a whole if a line is not a request, or makes the answers ambiguous. A line
that is a request but cannot be answered, because it is too long for example, gets an error line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from llmserve.client_bodies import PATHS
from llmserve.openai_messages import ApiRefusal


@dataclass(frozen=True)
class BatchLine:
    """One request of a batch."""

    custom_id: str
    url: str
    model: str
    body: bytes
    """JSON of the request."""
    method: str = "POST"
    stream: bool = False


class LineError(ValueError):
    """A line is wrong. The message does not have the number of the line.

    Args:
        message: what is wrong.
        code: short name of the problem.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Body(msgspec.Struct):
    model: str
    stream: bool | None = False


def read_line(text: bytes) -> BatchLine:
    """Return the request of a line.

    Raises:
        LineError: it is not a request.
    """
    try:
        line = msgspec.json.decode(text, type=_Line)
        body = msgspec.json.decode(line.body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LineError(f"it is not a request: {error}", "invalid_line") from None
    return BatchLine(
        line.custom_id, line.url, body.model, bytes(line.body), line.method, bool(body.stream)
    )


class BatchCheck:
    """Checks the lines of one batch, one after another.

    Args:
        urls: paths that a line may have.
        models: names of the models that are served.
    """

    def __init__(self, urls: Collection[str], models: Collection[str]) -> None:
        self._urls, self._models = urls, models
        self._number_of: dict[str, int] = {}

    def check(self, number: int, line: BatchLine) -> None:
        """Check a line. ``number``: of the line in the file, from 1.

        Raises:
            LineError: it is wrong.
        """
        if not line.custom_id:
            raise LineError("custom_id is empty", "missing_id")
        first = self._number_of.setdefault(line.custom_id, number)
        if first != number:
            raise LineError(f"custom_id {line.custom_id!r} is also in line {first}", "duplicate_id")
        if line.url not in self._urls or line.method != "POST":
            raise LineError(
                f"it is {line.method} {line.url}, but the batch is POST {' or '.join(self._urls)}",
                "mismatched_url",
            )
        if line.model not in self._models:
            served = ", ".join(sorted(self._models))
            raise LineError(
                f"there is no model {line.model!r}; served: {served}", "model_not_found"
            )
        if line.stream:
            raise LineError("stream is true; answers of a batch are not streamed", "stream")


def read_lines(content: bytes, endpoint: str, models: Collection[str]) -> list[BatchLine]:
    """Return the requests of an uploaded file.

    Args:
        content: JSON lines.
        endpoint: path that all of them must have.
        models: names of the models that are served.

    Raises:
        ApiRefusal: a line is wrong; the sentence names its number.
    """
    lines: list[BatchLine] = []
    check = BatchCheck((endpoint,), models)
    for number, text in _numbered(content):
        try:
            line = read_line(text)
            check.check(number, line)
        except LineError as error:
            sentence = f"Line {number}: {error}. Correct the file, and upload it again."
            raise ApiRefusal(400, sentence, error.code) from None
        lines.append(line)
    if not lines:
        raise ApiRefusal(400, "The file has no lines; a batch needs one request.", "empty_file")
    return lines


def _numbered(content: bytes) -> Iterator[tuple[int, bytes]]:
    for number, text in enumerate(content.split(b"\n"), 1):
        if text.strip():
            yield number, text


def check_endpoint(endpoint: str) -> None:
    """Raise ApiRefusal for a path that batches do not have."""
    if endpoint not in PATHS:
        sentence = f"A batch has no requests to {endpoint!r}; possible: {', '.join(PATHS)}."
        raise ApiRefusal(400, sentence, "invalid_endpoint")


def response_line(name: str, custom_id: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Return the output line of an answer, or of a refusal.

    Args:
        name: name of the answer, of which its ids are made.
        custom_id: the custom id of the request.
        status: HTTP status.
        body: the body of the response.
    """
    return {
        "id": f"batch_req_{name}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": f"req_{name}", "body": body},
        "error": None,
    }
