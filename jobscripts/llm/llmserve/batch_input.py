"""Reads and checks the file with the requests of a batch, line by line. Makes the names of answers
and the lines of the error file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from llmserve.batch_lines import BatchCheck, BatchLine, LineError, read_line
from llmserve.client_bodies import PATHS, ClientOrder, read_client_body
from llmserve.openai_messages import ApiRefusal
from llmserve.text import Tokenizer

MAX_PROBLEMS = 20
"""Maximum number of wrong lines in a message."""


class BatchInputError(ValueError):
    """The input of a batch is wrong; the message names the lines."""


class BatchInput:
    """The input of a batch. A line is read each time when it is needed.

    Args:
        path: JSON lines.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets: list[int] = []
        self.numbers: list[int] = []
        """Number of each request's line in the file, from 1; empty lines have no request."""
        digest, offset = hashlib.sha256(), 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                digest.update(line)
                if line.strip():
                    self._offsets.append(offset)
                    self.numbers.append(number)
                offset += len(line)
        self.digest = digest.hexdigest()
        """SHA-256 of the file."""
        self._file = path.open("rb")

    def __len__(self) -> int:
        return len(self._offsets)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def line(self, index: int) -> BatchLine:
        """Return a request.

        Args:
            index: from 0.

        Raises:
            LineError: the line is not a request.
        """
        self._file.seek(self._offsets[index])
        return read_line(self._file.readline())

    def order(
        self,
        index: int,
        models: Collection[str],
        tokenizer: Tokenizer,
    ) -> tuple[BatchLine, ClientOrder]:
        """Return the line of a request, and the parsed request.

        Raises:
            ApiRefusal: it is wrong.
            LineError: the line is not a request.
        """
        line = self.line(index)
        return line, read_client_body(line.body, line.url, models=models, tokenizer=tokenizer)

    def check(self, models: Collection[str], tokenizer: Tokenizer) -> None:
        """Check every line. A request that is too long passes: it gets an error when it is
        answered.

        Raises:
            BatchInputError: there is no line, or some are wrong.
        """
        if not len(self):
            raise BatchInputError(f"{self.path} has no requests.")
        problems = []
        for problem in self._problems(models, tokenizer):
            problems.append(problem)
            if len(problems) == MAX_PROBLEMS:
                problems.append("(further lines were not checked)")
                break
        if problems:
            text = "\n".join(problems)
            raise BatchInputError(f"{self.path} is not submitted. Correct these lines:\n{text}")

    def _problems(self, models: Collection[str], tokenizer: Tokenizer) -> Iterator[str]:
        lines = BatchCheck(PATHS, models)
        for index, number in enumerate(self.numbers):
            try:
                line = self.line(index)
                lines.check(number, line)
                read_client_body(line.body, line.url, models=models, tokenizer=tokenizer)
            except LineError as error:
                yield f"Line {number}: {error}."
            except ApiRefusal as refusal:
                yield f"Line {number}: {refusal.sentence}"


def error_line(custom_id: str, code: str, sentence: str) -> dict[str, Any]:
    """Return the line of a request that has no answer."""
    return {
        "id": f"batch_req_{name_of(custom_id)}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": sentence},
    }


def answer_name(custom_id: str, *, is_chat: bool) -> str:
    """Return the name of an answer."""
    return f"{'chatcmpl' if is_chat else 'cmpl'}-{name_of(custom_id)}"


def name_of(custom_id: str) -> str:
    """Return the name of the answer to a request. It depends only on the custom id, so that an
    interrupted batch ends with the same lines.
    """
    return hashlib.sha256(custom_id.encode("utf-8", "surrogatepass")).hexdigest()[:24]
