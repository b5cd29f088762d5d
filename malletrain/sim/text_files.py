"""Reads text files of any size, such as logs of jobs: as a whole, by lines, or one list of a JSON
file object by object, such as the jobs of ``sacct --json``.

Only :func:`read_text` has a whole file in memory; :func:`json_objects` has no more of it than a few
of its objects. Decides how errors in reading are reported, and nothing about the content.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from malletrain.sim.workloads import WorkloadError

FIRST_LINE_CHARACTERS = 1 << 16
"""Maximum number of characters of the first line that :func:`first_line` reads."""
CHUNK_CHARACTERS = 1 << 20
"""Least number of characters of a JSON file that are read at once."""
_SPACE = " \t\r\n"


@contextlib.contextmanager
def opened_text(path: str | Path) -> Iterator[IO[str]]:
    """Open a text file, which may be gzip-compressed, for the duration of a context. Bytes that are
    not UTF-8, such as in job names, become replacement characters.

    Raises:
        WorkloadError: the file cannot be read, in the context too.
    """
    try:
        with open(path, "rb") as raw:
            compressed = raw.peek(2)[:2] == b"\x1f\x8b"
            content = gzip.GzipFile(fileobj=raw) if compressed else raw
            yield io.TextIOWrapper(content, encoding="utf-8-sig", errors="replace")
    except FileNotFoundError:
        raise WorkloadError(f"{path}: There is no such file.") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise WorkloadError(f"{path}: The gzip file is damaged ({error}).") from None
    except OSError as error:
        raise WorkloadError(
            f"{path}: The file cannot be read: {error.strerror or error}."
        ) from None


def lines_of(path: str | Path) -> Iterator[str]:
    """Yield the lines of a text file (:func:`opened_text`) with their line ends. Never holds the
    whole file in memory.

    Raises:
        WorkloadError: the file cannot be read or is not text.
    """
    with opened_text(path) as file:
        for line in file:
            if "\0" in line:
                raise WorkloadError(f"{path}: This is not a text file.")
            yield line


def first_line(path: str | Path) -> str:
    """Return the beginning of the first line of a text file that is not blank; empty if there is
    none. A file of any size may be one line.

    Raises:
        WorkloadError: the file cannot be read or is not text.
    """
    with opened_text(path) as file:
        while line := file.readline(FIRST_LINE_CHARACTERS):
            if "\0" in line:
                raise WorkloadError(f"{path}: This is not a text file.")
            if line.strip():
                return line
    return ""


def read_text(path: str | Path) -> str:
    """Return the text of a file (:func:`opened_text`).

    Raises:
        WorkloadError: the file cannot be read or is not text.
    """
    with opened_text(path) as file:
        text = file.read()
    if "\0" in text:
        raise WorkloadError(f"{path}: This is not a text file.")
    return text


def json_objects(path: str | Path, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (its first line, object) of the list ``key`` of a JSON file that is one object.

    Raises:
        WorkloadError: the file cannot be read, is not JSON, or has no such list of objects.
    """
    with opened_text(path) as file:
        reader = _JsonReader(path, file)
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


class _JsonReader:
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
