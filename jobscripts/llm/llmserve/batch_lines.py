"""The lines of a batch, as the OpenAI batch API has them: one read, and all of a batch checked
before any node is asked for. Pure.

A batch is refused as a whole for what makes its answers ambiguous or is no request. A line that is
a request but cannot be answered (too long, say) gets an error of its own.
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
    """A line is wrong. The message says what is wrong, without the number of the line.

    Args:
        what: the message.
        code: short name of the problem.
    """

    def __init__(self, what: str, code: str) -> None:
        super().__init__(what)
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
    """Returns the request of a line.

    Raises:
        LineError: it is no request.
    """
    try:
        line = msgspec.json.decode(text, type=_Line)
        body = msgspec.json.decode(line.body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LineError(f"it is no request: {error}", "invalid_line") from None
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
            raise LineError(
                f"custom_id {line.custom_id!r} is that of line {first} too", "duplicate_id"
            )
        if line.url not in self._urls or line.method != "POST":
            what = (
                f"it is {line.method} {line.url}, and the batch is POST {' or '.join(self._urls)}"
            )
            raise LineError(what, "mismatched_url")
        if line.model not in self._models:
            what = f"there is no model {line.model!r}; served: {', '.join(sorted(self._models))}"
            raise LineError(what, "model_not_found")
        if line.stream:
            raise LineError("stream is true; answers of a batch are not streamed", "stream")


def read_lines(content: bytes, endpoint: str, models: Collection[str]) -> list[BatchLine]:
    """Returns the requests of an uploaded file.

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
    """Returns the line of an answer, or of a refusal.

    Args:
        name: of the answer, for its ids.
        custom_id: of the request.
        status: of HTTP.
        body: of the response.
    """
    return {
        "id": f"batch_req_{name}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": f"req_{name}", "body": body},
        "error": None,
    }
