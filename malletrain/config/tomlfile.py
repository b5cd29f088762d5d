"""Reads a TOML file as data, with the line of each key, and reports syntax errors as problems.

Decides which line a key is on and how much of a file with syntax errors can still be read. It knows
no key by name. ``tomllib`` (``tomli`` on Python 3.10) does all parsing of TOML. To find the lines
of keys, it parses one statement at a time. tomlkit knows no lines of keys, and reads nothing of a
file with a syntax error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from malletrain.protocol.database_url import without_passwords

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Path = tuple[str, ...]

_POSITION = re.compile(r"\s*\(at (?:line (?P<line>\d+), column \d+|end of document)\)$")
_BARE_QUANTITY = re.compile(
    r"""^\s*(?P<key>[\w.\-]+)\s*=\s*(?P<value>[+-]?[\d.]+\s*[A-Za-z]+)\s*(?:#.*)?$"""
)
_BARE_WORD = re.compile(
    r"""^\s*(?P<key>[\w.\-]+)\s*=\s*(?P<value>[A-Za-z/~][^"'#\[\]{}]*?)\s*(?:#.*)?$"""
)
MAX_SYNTAX_PROBLEMS = 10


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a file.

    ``line`` counts from 1 (``None``: the file as a whole); ``key`` is the full dotted name or
    empty.
    """

    line: int | None
    key: str
    message: str

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line is not None else ""
        return f"{where}{self.key}: {self.message}" if self.key else f"{where}{self.message}"


@dataclass(frozen=True)
class TomlText:
    """The readable part of a TOML text: its data, the line of each key path, and the syntax
    problems.
    """

    data: dict[str, Any] = field(default_factory=dict)
    lines: dict[Path, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    complete: bool = True
    """False if reading stopped at a syntax error, so that a key that seems missing may be below it.
    """

    def line_of(self, path: Path) -> int | None:
        """Return the line of ``path``, or of the nearest enclosing table that the text names;
        ``None`` if it names none.
        """
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path[:-1]
        return None


def read_toml(text: str) -> TomlText:
    """Read ``text``.

    A bad line is reported. If it is safe to skip it, reading continues after it; otherwise reading
    ends there.
    """
    rows = text.replace("\r\n", "\n").split(
        "\n"
    )  # splitlines() would also split at form feeds, unlike TOML
    problems: list[Problem] = []
    while True:
        try:
            data = tomllib.loads("\n".join(rows))
            return TomlText(data, _lines_of(rows), tuple(problems), complete=True)
        except tomllib.TOMLDecodeError as error:
            message, line = _explain(str(error), rows)
            problems.append(Problem(line, "", message))
            if len(problems) < MAX_SYNTAX_PROBLEMS and _is_isolated_error(rows, line):
                rows[line - 1] = ""
                continue
            problems[-1] = Problem(
                line, "", f"{message} The lines below are checked once this is corrected."
            )
        except RecursionError:
            problems.append(
                Problem(None, "", "The file nests arrays or tables too deeply to be read.")
            )
        return _read_before_error(rows, problems)


def _read_before_error(rows: list[str], problems: list[Problem]) -> TomlText:
    """Return the statements above the last syntax error, to find the problems in them."""
    end = (problems[-1].line or 1) - 1
    for last in range(end, 0, -1):
        try:
            return TomlText(
                tomllib.loads("\n".join(rows[:last])),
                _lines_of(rows[:last]),
                tuple(problems),
                complete=False,
            )
        except (tomllib.TOMLDecodeError, RecursionError):
            continue
    return TomlText(problems=tuple(problems), complete=False)


def _explain(error: str, rows: list[str]) -> tuple[str, int]:
    """Return (sentence, line) of a parser's message, with a hint for two common mistakes: a
    quantity or a word without quotes.
    """
    match = _POSITION.search(error)
    line = int(match["line"]) if match and match["line"] else max(len(rows), 1)
    parser_message = error[: match.start()] if match else error
    row = rows[line - 1] if line <= len(rows) else ""
    hint = ""
    for pattern in (_BARE_QUANTITY, _BARE_WORD):
        if mistake := pattern.match(row):
            hint = (
                f" Text and quantities with a unit need quotes: {mistake['key']} = "
                f'"{mistake["value"]}".'
            )
            break
    sentence = f"This is not valid TOML: {parser_message[:1].lower()}{parser_message[1:]}.{hint}"
    return without_passwords(sentence), line


def _is_isolated_error(rows: list[str], line: int) -> bool:
    """Return whether the error is limited to this row, so that skipping it does not change the
    meaning of other rows.
    """
    row = rows[line - 1] if line <= len(rows) else ""
    if '"""' in row or "'''" in row or row.lstrip().startswith("[") or "=" not in row:
        return False
    if row.count("[") != row.count("]") or row.count("{") != row.count("}"):
        return False
    try:
        tomllib.loads("\n".join(rows[: line - 1]))
    except tomllib.TOMLDecodeError:
        return False
    return True


def _statements(rows: list[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each statement of a valid text. A statement is the shortest group of
    rows that parses by itself.
    """
    start = 0
    while start < len(rows):
        for end in range(start + 1, len(rows) + 1):
            piece = "\n".join(rows[start:end])
            try:
                tomllib.loads(piece)
            except tomllib.TOMLDecodeError:
                continue
            yield start + 1, piece
            start = end
            break
        else:
            return


def _lines_of(rows: list[str]) -> dict[Path, int]:
    lines: dict[Path, int] = {}
    table: Path = ()
    tables: dict[Path, int] = {}
    for line, piece in _statements(rows):
        data = tomllib.loads(piece)
        header = piece.lstrip().startswith("[")
        if header:
            table = ()
        deepest: Path = table
        for path in _paths(data):
            deepest = table + path
            lines.setdefault(deepest, line)
        if piece.lstrip().startswith("[["):
            number = tables[deepest] = tables.get(deepest, -1) + 1
            deepest = (*deepest, str(number))
            lines[deepest] = line
        if header:
            table = deepest
    return lines


def _paths(data: dict[str, Any]) -> Iterator[Path]:
    """Yield every key path in ``data``, each table before its content."""
    for key, value in data.items():
        yield (key,)
        inner = (
            value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else value
        )
        if isinstance(inner, dict):
            for rest in _paths(inner):
                yield (key, *rest)
