"""A TOML file as data plus the line on which each key stands, with syntax errors as problems and
never as tracebacks.

Decides which line a key is on and how much of a file with syntax errors can still be read. It knows
no key by name. TOML itself is parsed by ``tomllib`` (``tomli`` on Python 3.10) alone: lines are
found by giving it one statement at a time.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

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
    """What could be read of a TOML text: its data, the line of each key path, and the syntax
    problems.
    """

    data: dict[str, Any] = field(default_factory=dict)
    lines: dict[Path, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    complete: bool = True
    """False when reading stopped at a syntax error, so that a key that seems missing may stand
    further down.
    """

    def line_of(self, path: Path) -> int | None:
        """The line of ``path``, or of the nearest table around it that the text names; ``None``
        when it names none.
        """
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path[:-1]
        return None


def read_toml(text: str) -> TomlText:
    """Read ``text``.

    A bad line is reported, left out and reading goes on where that is safe; else reading ends at
    it.
    """
    rows = text.replace("\r\n", "\n").split(
        "\n"
    )  # splitlines() would also split at form feeds, which TOML does not
    problems: list[Problem] = []
    while True:
        try:
            data = tomllib.loads("\n".join(rows))
            return TomlText(data, _lines_of(rows), tuple(problems), complete=True)
        except tomllib.TOMLDecodeError as error:
            message, line = _explain(str(error), rows)
            problems.append(Problem(line, "", message))
            if len(problems) < MAX_SYNTAX_PROBLEMS and _bad_alone(rows, line):
                rows[line - 1] = ""
                continue
            problems[-1] = Problem(
                line, "", f"{message} What stands below is checked once this is mended."
            )
        except RecursionError:
            problems.append(
                Problem(None, "", "The file nests arrays or tables too deeply to be read.")
            )
        return _what_stands_before(rows, problems)


def _what_stands_before(rows: list[str], problems: list[Problem]) -> TomlText:
    """The statements above the last syntax error, for the problems that can be told from them."""
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
    """(sentence, line) of a parser's message, with a hint for the two usual slips: a quantity or a
    word without quotes.
    """
    match = _POSITION.search(error)
    line = int(match["line"]) if match and match["line"] else max(len(rows), 1)
    what = error[: match.start()] if match else error
    row = rows[line - 1] if line <= len(rows) else ""
    hint = ""
    for pattern in (_BARE_QUANTITY, _BARE_WORD):
        if slip := pattern.match(row):
            hint = (
                f" Text and quantities with a unit stand in quotes: {slip['key']} = "
                f'"{slip["value"]}".'
            )
            break
    return f"This is not valid TOML: {what[:1].lower()}{what[1:]}.{hint}", line


def _bad_alone(rows: list[str], line: int) -> bool:
    """Whether the row is wrong by itself: leaving it out then changes the meaning of no other
    row.
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
    """(line, text) of each statement of a text that parses: the fewest rows that parse by
    themselves.
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
    """Every key path in ``data``, each table before what it holds."""
    for key, value in data.items():
        yield (key,)
        inner = (
            value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else value
        )
        if isinstance(inner, dict):
            for rest in _paths(inner):
                yield (key, *rest)
