"""Reads one list of a large JSON file object by object, such as the jobs of ``sacct --json``.

Never has more of the file in memory than a few of its objects. Decides nothing about their content.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from malletrain.sim.workload_files import opened_text
from malletrain.sim.workloads import WorkloadError

CHUNK_CHARACTERS = 1 << 20
"""Least number of characters that are read at once."""
_SPACE = " \t\r\n"


def objects(path: str | Path, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (its first line, object) of the list ``key`` of a JSON file that is one object.

    Raises:
        WorkloadError: the file cannot be read, is not JSON, or has no such list of objects.
    """
    with opened_text(path) as file:
        reader = _Reader(path, file)
        reader.take("{")
        while not reader.at("}"):
            name = reader.value()
            reader.take(":")
            if name != key:
                reader.value()
            else:
                reader.take("[")
                while not reader.at("]"):
                    line = reader.line
                    entry = reader.value()
                    if not isinstance(entry, dict):
                        raise WorkloadError(f"{path}, line {line}: This entry is no JSON object.")
                    yield line, entry
                    reader.skip_comma()
                return
            reader.skip_comma()
    raise WorkloadError(f"{path}: The JSON object has no list '{key}'.")


class _Reader:
    """The rest of a JSON file."""

    def __init__(self, path: str | Path, file: IO[str]) -> None:
        self.line = 1
        """The line of the next character."""
        self._path = path
        self._file = file
        self._text = ""
        self._position = 0
        self._decoder = json.JSONDecoder()

    def at(self, character: str) -> bool:
        """Return whether the next character, after white space, is this one."""
        return self._peek() == character

    def take(self, character: str) -> None:
        """Skip this character, after white space. Raises WorkloadError if it is not there."""
        if not self.at(character):
            raise WorkloadError(
                f"{self._path}, line {self.line}: This is not JSON: '{character}' is missing."
            )
        self._skip(self._position + 1)

    def skip_comma(self) -> None:
        """Skip a comma, if it is the next character."""
        if self.at(","):
            self._skip(self._position + 1)

    def value(self) -> Any:
        """Return the next value. Raises WorkloadError if there is none."""
        self._peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._position)
                # A number that ends with the text may go on in the file.
                if end < len(self._text) or not self._read():
                    break
            except json.JSONDecodeError as error:
                line = self.line + self._text.count("\n", self._position, error.pos)
                if not self._read():
                    raise WorkloadError(
                        f"{self._path}, line {line}: This is not JSON: {error.msg}."
                    ) from None
        self._skip(end)
        return value

    def _peek(self) -> str:
        """Return the next character that is no white space; empty at the end of the file."""
        while True:
            end = self._position
            while end < len(self._text) and self._text[end] in _SPACE:
                end += 1
            self._skip(end)
            if end < len(self._text):
                return self._text[end]
            if not self._read():
                return ""

    def _skip(self, end: int) -> None:
        self.line += self._text.count("\n", self._position, end)
        self._position = end

    def _read(self) -> bool:
        """Read more of the file; return whether there was more. The amount grows with the value
        that is incomplete, so that a large one is not decoded again for every chunk.
        """
        rest = self._text[self._position :]
        more = self._file.read(max(CHUNK_CHARACTERS, len(rest)))
        self._text, self._position = rest + more, 0
        return bool(more)
