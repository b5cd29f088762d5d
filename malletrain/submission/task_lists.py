"""Inputs of one submission that makes many jobs (``--array``) or many tasks (a farm's table).

``--array``: decides which indices exist and where ``{index}`` is replaced.

The tasks of a farm as a user gives them: CSV, TSV or JSON lines, lines, names of files, the indices
of an array. Decides the names of the columns, and what of an input is refused. The rows are written
to a temporary file in groups as they are sent to the daemon, so that a million of them need little
memory. :mod:`malletrain.protocol.farm` puts the values into the command.
"""

from __future__ import annotations

import csv
import glob
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import IO

import msgspec

from malletrain.protocol import env
from malletrain.protocol.counting import counted
from malletrain.protocol.farm import MAX_COLUMNS, MAX_ROWS, MAX_TASKS, MAX_VALUE_LENGTH
from malletrain.protocol.messages import JobSpec
from malletrain.submission.error import SpecError

PLACE = "{index}"
MOST_JOBS = 1000
ARRAY_HELP = "indices and ranges of them with commas between, such as 1-10, 0-20:5 or 1,4,9"
_PART = re.compile(r"\s*([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?\s*")
GROUP_BYTES = 256 * 1024
"""Size of a group of rows, packed: half of a request."""
MAX_ROW_BYTES = 400 * 1024
"""Maximum size of one row, packed."""
LINE, PATH = "line", "path"
"""Names of the only column of tasks from lines, and from files."""


def indices(text: str, most: int = MOST_JOBS, what: str = "jobs") -> tuple[int, ...]:
    """Return the indices of ``--array``, in their order, without duplicates.

    Args:
        text: indices and ranges of them.
        most: maximum number of indices.
        what: what an index stands for, in error messages.

    Raises:
        SpecError: the text is not an array, or has too many indices.
    """
    indices_: dict[int, None] = {}
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise SpecError(f'"{text}" is no array; accepted is {ARRAY_HELP}.', "array")
        first = int(match[1])
        last, step = int(match[2] or first), int(match[3] or 1)
        if last < first or step < 1:
            raise SpecError(
                f'"{part.strip()}" goes from no index to none; accepted is {ARRAY_HELP}.', "array"
            )
        if len(indices_) + (last - first) // step >= most:
            raise SpecError(f'"{text}" is more than {most:,} {what}.', "array")
        indices_.update(dict.fromkeys(range(first, last + 1, step)))
    return tuple(indices_)


def one_of(spec: JobSpec, index: int) -> JobSpec:
    """Return the job for one index. The number replaces ``{index}`` in its arguments and
    variables, is appended to its name, and is passed to the script in a variable.
    """
    number = str(index)
    name = spec.name
    return msgspec.structs.replace(
        spec,
        name=f"{name[: 63 - len(number)]}-{number}",
        args=tuple(arg.replace(PLACE, number) for arg in spec.args),
        env={
            **{key: value.replace(PLACE, number) for key, value in spec.env.items()},
            env.ARRAY_INDEX: number,
        },
    )


SUFFIXES = {".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
"""Suffix of a file of tasks → its format; other files are told by their first line."""

Row = tuple[int, tuple[str, ...]]
"""The line on which a task stands, from 1, and its values."""


@dataclass(frozen=True)
class TaskInput:
    """An opened input: its columns are known, its rows are read later."""

    name: str
    """What the input is called in error messages."""
    columns: tuple[str, ...]
    """Names of the values of a task."""
    rows: Iterable[Row]
    """The tasks."""


class TaskList:
    """The tasks of a farm, in a temporary file.

    Args:
        source: the input. It is read to its end.

    Raises:
        SpecError: a row cannot be a task, or there is none; the sentence names the line.
    """

    def __init__(self, source: TaskInput) -> None:
        self.columns = source.columns
        """Names of the values of a task."""
        self.count = 0
        """Number of tasks."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the list
        self._sizes: list[int] = []
        group: list[tuple[str, ...]] = []
        size = 0
        for line, values in source.rows:
            row_size = _checked_size(source, line, values)
            if group and (len(group) == MAX_ROWS or size + row_size > GROUP_BYTES):
                self._write(group)
                group, size = [], 0
            group.append(values)
            size += row_size
            if self.count + len(group) > MAX_TASKS:
                raise SpecError(
                    f"{source.name} has more than {MAX_TASKS:,} tasks; split it into several "
                    "farms.",
                    "tasks",
                )
        if group:
            self._write(group)
        if not self.count:
            raise SpecError(f"{source.name} has no tasks.", "tasks")

    def groups(self) -> Iterator[tuple[int, list[tuple[str, ...]]]]:
        """Yield the tasks in groups that fit into a request: the number of the first task, and the
        values of each.
        """
        first = 0
        self._file.seek(0)
        for size in self._sizes:
            rows = msgspec.msgpack.decode(self._file.read(size), type=list[tuple[str, ...]])
            yield first, rows
            first += len(rows)

    def head(self, count: int) -> list[tuple[str, ...]]:
        """Return the values of the first ``count`` tasks."""
        rows: list[tuple[str, ...]] = []
        for _, group in self.groups():
            rows += group
            if len(rows) >= count:
                break
        return rows[:count]

    def close(self) -> None:
        """Delete the temporary file."""
        self._file.close()

    def _write(self, group: list[tuple[str, ...]]) -> None:
        self._sizes.append(self._file.write(msgspec.msgpack.encode(group)))
        self.count += len(group)


def _checked_size(source: TaskInput, line: int, values: Sequence[str]) -> int:
    """Return the packed size of a row, in bytes. Raises SpecError if it cannot be a task."""
    size = 5
    for column, value in zip(source.columns, values, strict=True):
        if "\0" in value or len(value) > MAX_VALUE_LENGTH:
            raise SpecError(
                f"{source.name} line {line}: the value of {column} is longer than "
                f"{MAX_VALUE_LENGTH:,} characters, or contains a NUL character.",
                "tasks",
            )
        size += 5 + (len(value) if value.isascii() else len(value.encode(errors="replace")))
    if size > MAX_ROW_BYTES:
        raise SpecError(
            f"{source.name} line {line} has {size:,} bytes; a task has {MAX_ROW_BYTES:,} at most. "
            "Put long values into a file, and its name here.",
            "tasks",
        )
    return size


def open_tasks(file: IO[bytes], name: str) -> TaskInput:
    """Return the tasks of a file: CSV or TSV with a header, or JSON lines. The suffix of the name
    decides which, else the first line.

    Raises:
        SpecError: there are no columns, or they have no usable names.
    """
    lines = _decoded(file, name)
    head: list[str] = []
    for line in lines:
        head.append(line)
        if line.strip():
            break
    if not head or not head[-1].strip():
        raise SpecError(f"{name} is empty; its first line names the columns.", "tasks")
    kind = SUFFIXES.get(os.path.splitext(name)[1].lower()) or _format_of(head[-1])
    rest = chain(head, lines)
    if kind == "jsonl":
        return _json_lines(rest, head, name)
    return _table(rest, name, "\t" if kind == "tsv" else ",")


def open_lines(file: IO[bytes], name: str) -> TaskInput:
    """Return the lines of a file as tasks, one column. Empty lines are left out."""

    def rows() -> Iterator[Row]:
        for number, line in enumerate(_decoded(file, name), 1):
            if text := line.rstrip("\r\n"):
                yield number, (text,)

    return TaskInput(name, (LINE,), rows())


def files_of(patterns: Sequence[str], absolute: bool = False) -> TaskInput:
    """Return the files of patterns and names as tasks, in natural order: ``run2`` is before
    ``run10``. Duplicates are left out.

    Args:
        patterns: patterns, and names of files, relative to the current directory.
        absolute: whether the tasks get absolute paths, because they run in another directory.

    Raises:
        SpecError: a pattern matches no file, or a name is not there.
    """
    paths: dict[str, None] = {}
    for pattern in patterns:
        text = os.path.expanduser(pattern)
        matches = [text] if os.path.exists(text) else glob.glob(text, recursive=True)
        if not matches:
            raise SpecError(f"--each: {pattern} matches no file here.", "each")
        if absolute:
            matches = [os.path.abspath(match) for match in matches]
        paths.update(dict.fromkeys(matches))
    for path in paths:
        if problem := not_utf8(path):
            raise SpecError(f"--each: the name of a file {problem}; rename it.", "each")
    ordered = sorted(paths, key=natural)
    return TaskInput("--each", (PATH,), ((k, (path,)) for k, path in enumerate(ordered, 1)))


def array_of(text: str) -> tuple[TaskInput, int | None]:
    """Return the indices of ``--array`` as tasks, and the number after ``%``, which is how many
    run at a time; None without one.

    Raises:
        SpecError: the text is not an array as sbatch writes it.
    """
    match = re.fullmatch(r"([^%]*)(?:%([0-9]{1,9}))?", text.strip())
    if match is None:
        raise SpecError(f'"{text}" is no array; accepted is one such as 1-1000:2%50.', "array")
    numbers = indices(match[1], MAX_TASKS, "tasks")
    rows = ((k, (str(number),)) for k, number in enumerate(numbers, 1))
    return TaskInput("--array", ("index",), rows), int(match[2]) if match[2] else None


def not_utf8(text: str) -> str:
    """Return what is wrong with a word that is not UTF-8, with the word as it can be printed; empty
    if nothing is. Python has its other bytes as surrogates (PEP 383).
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"is not UTF-8: {text.encode(errors='surrogateescape')!r}"
    return ""


def natural(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key that compares digits by their number, and other characters as text."""
    parts = re.split(r"([0-9]+)", text)
    return [(1, int(part), part) if part.isdecimal() else (0, 0, part) for part in parts]


def _decoded(file: IO[bytes], name: str) -> Iterator[str]:
    """Yield the lines of a file, decoded from UTF-8, without a byte order mark."""
    for number, line in enumerate(file, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise SpecError(
                f"{name} line {number} is not UTF-8 text; convert it, for example with iconv.",
                "tasks",
            ) from None


def _format_of(line: str) -> str:
    if line.lstrip().startswith(("{", "[")):
        return "jsonl"
    return "tsv" if "\t" in line else "csv"


def _table(lines: Iterable[str], name: str, delimiter: str) -> TaskInput:
    reader = csv.reader(lines, delimiter=delimiter, strict=True)

    def records() -> Iterator[Row]:
        try:
            for record in reader:
                if record:
                    yield reader.line_num, tuple(record)
        except csv.Error as error:
            raise SpecError(f"{name} line {reader.line_num}: {error}.", "tasks") from None

    lines_and_values = records()
    _, header = next(lines_and_values)
    columns = _checked_columns([text.strip() for text in header], name)

    def rows() -> Iterator[Row]:
        for line, values in lines_and_values:
            if len(values) != len(columns):
                raise SpecError(
                    f"{name} line {line} has {counted(len(values), 'value')}, and the header "
                    f"has {counted(len(columns), 'column')} ({', '.join(columns)}).",
                    "tasks",
                )
            yield line, values

    return TaskInput(name, columns, rows())


def _json_lines(lines: Iterable[str], head: Sequence[str], name: str) -> TaskInput:
    def read(line: int, text: str) -> dict[str, msgspec.Raw]:
        try:
            return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise SpecError(
                f"{name} line {line} is no JSON object ({error}); each line holds one, such as "
                '{"lr": 0.1, "seed": 3}.',
                "tasks",
            ) from None

    columns = _checked_columns(list(read(len(head), head[-1])), name)

    def rows() -> Iterator[Row]:
        for line, text in enumerate(lines, 1):
            if not text.strip():
                continue
            values = read(line, text)
            if values.keys() != set(columns):
                odd = sorted(values.keys() ^ set(columns))[0]
                has_or_lacks = "has" if odd in values else "has no"
                raise SpecError(
                    f"{name} line {line} {has_or_lacks} {odd}; the first line has "
                    f"{', '.join(columns)}, and all lines have the same.",
                    "tasks",
                )
            yield line, tuple(_text_of(bytes(values[column])) for column in columns)

    return TaskInput(name, columns, rows())


def _text_of(raw: bytes) -> str:
    """Return a JSON value as text: numbers as they are written, null as nothing."""
    text = raw.decode().strip()
    if text.startswith('"'):
        return msgspec.json.decode(text, type=str)
    return "" if text == "null" else text


def _checked_columns(columns: list[str], name: str) -> tuple[str, ...]:
    """Return the names of columns. Raises SpecError if they cannot be used."""
    for number, column in enumerate(columns, 1):
        if not column:
            raise SpecError(
                f"{name}: column {number} has no name; the first line names the columns.", "tasks"
            )
        if any(c in "{}" or not c.isprintable() for c in column):
            raise SpecError(
                f"{name}: column {number} is called {column!r}; names have no braces.", "tasks"
            )
        if column in columns[: number - 1]:
            raise SpecError(f"{name} has two columns called {column}; rename one.", "tasks")
    if not 1 <= len(columns) <= MAX_COLUMNS:
        raise SpecError(f"{name} has {len(columns)} columns; 1 to {MAX_COLUMNS} are read.", "tasks")
    return tuple(columns)
