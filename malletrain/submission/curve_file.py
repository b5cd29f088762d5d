"""The files of ``malletrain submit`` with a number for each size: ``--curve`` and ``--value``.
Decides their form and what a valid number is.

:func:`read_curve`: a job's throughput by scale as its owner states it, in CSV or JSON.

:func:`read_value`: the value of each number of nodes to a service. Two forms, distinguished by
their first line. CSV with the header ``nodes,value`` and one line per size; TOML with a table
``[value]`` of ``nodes = value`` lines. Values between listed sizes are interpolated linearly;
beyond the last size the value is constant. Values need not increase or have diminishing returns: a
service that is useless on fewer than 4 nodes has the value 0 there. With zeros only it gets no node
until its values are set.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from malletrain.protocol.bounds import MAX_NODES, MAX_WORTH_SIZES
from malletrain.submission.error import SpecError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

AUTO = "auto"
"""Instead of a file: the service's process reports the values itself, and again when they
change."""
NOTHING = "0"
"""Instead of a file: nodes are worth nothing until the service's owner says what they are worth."""
VALUE_HELP = (
    'CSV with the header "nodes,value", or TOML with a table [value] of lines such as 4 = 100.0; '
    "or the word auto, if its process says it itself; or 0, if it needs no node until 'malletrain "
    "worth' says otherwise"
)


CURVE_HELP = 'CSV with the header "nodes,samples_per_s", or JSON such as {"1": 120.0, "2": 230.5}'

Points = list[tuple[str, float, float]]
"""(place in the file, nodes, number) of each size."""


class _FileKind(NamedTuple):
    """What the errors of one kind of file say."""

    name: str
    """Name of the file."""
    column: str
    """Second column of a CSV file."""
    accepted: str
    """Accepted forms."""
    number: str
    """What a number is, after "is not"."""


_VALUES = _FileKind("value file", "value", VALUE_HELP, "a value; it is a finite number, 0 or more")
_CURVE = _FileKind(
    "scaling curve",
    "samples_per_s",
    CURVE_HELP,
    "a throughput; it is a number of samples/s, 0 or more",
)


def read_value(path: Path) -> dict[str, float]:
    """Return nodes (as text) → value, sorted by nodes. Raises SpecError with the problem and its
    place."""
    text = _read(path, _VALUES)
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    points = _from_toml(text, path) if first.startswith("[") else _from_csv(text, path, _VALUES)
    return _by_size(points, path, _VALUES)


def read_curve(path: Path) -> dict[str, float]:
    """Return the scaling curve in a file (CSV or JSON): nodes as text → samples/s, sorted by
    nodes. Raises SpecError."""
    text = _read(path, _CURVE)
    is_json = text.lstrip()[:1] in ("{", "[")
    points = _from_json(text, path) if is_json else _from_csv(text, path, _CURVE)
    return _by_size(points, path, _CURVE)


def _read(path: Path, kind: _FileKind) -> str:
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise SpecError(f"The {kind.name} {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise SpecError(
            f"The {kind.name} {path} is not a text file; accepted is {kind.accepted}."
        ) from None


def _by_size(points: Points, path: Path, kind: _FileKind) -> dict[str, float]:
    if not points:
        raise SpecError(f"The {kind.name} {path} lists no size; accepted is {kind.accepted}.")
    numbers: dict[int, float] = {}
    for where, nodes, number in points:
        if not nodes.is_integer() or not 1 <= nodes <= MAX_NODES:
            raise SpecError(
                f"{where}: {nodes:g} is not a number of nodes; sizes are whole numbers from 1 "
                f"to {MAX_NODES:,}."
            )
        if not math.isfinite(number) or number < 0:
            raise SpecError(f"{where}: {number:g} is not {kind.number}.")
        if int(nodes) in numbers:
            raise SpecError(f"{where}: {nodes:g} nodes are named twice; name each size once.")
        numbers[int(nodes)] = number
    return {str(nodes): numbers[nodes] for nodes in sorted(numbers)}


PAIRS_HELP = "numbers of nodes with their values, such as 4=40 8=100"


def parse_values(pairs: Iterable[str]) -> dict[int, float]:
    """Return nodes → value of words such as ``4=40``. Raises SpecError."""
    values: dict[int, float] = {}
    for pair in pairs:
        nodes, equals, value = pair.partition("=")
        if not equals or not nodes.isascii() or not nodes.isdecimal():
            raise SpecError(
                f'"{pair[:60]}" is not a number of nodes and its value; accepted are {PAIRS_HELP}.'
            )
        if len(nodes) > 9 or not 1 <= int(nodes) <= MAX_NODES:
            raise SpecError(
                f'"{pair[:60]}": sizes are whole numbers of nodes from 1 to {MAX_NODES:,}.'
            )
        if int(nodes) in values:
            raise SpecError(f"{int(nodes)} nodes are valued twice; name each size once.")
        values[int(nodes)] = parse_value(pair[:60], value)
    if len(values) > MAX_WORTH_SIZES:
        raise SpecError(
            f"{len(values)} sizes are valued; name {MAX_WORTH_SIZES} at most, the others are "
            "interpolated."
        )
    return values


def parse_value(where: str, text: str) -> float:
    """Return the value of some nodes. Raises SpecError with ``where`` if it is not valid."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise SpecError(f'{where}: "{text[:40]}" is not a value; it is a finite number, 0 or more.')
    return value


def span(value: Mapping[str, float]) -> str:
    """Return the sizes with a value above 0 in the form of ``--nodes``; all if none has one."""
    sizes = [int(nodes) for nodes in value]
    useful = [int(nodes) for nodes, worth in value.items() if worth > 0]
    return f"{min(useful or sizes)}:{max(sizes)}"


def _from_csv(text: str, path: Path, kind: _FileKind) -> Points:
    try:
        rows = [
            (n, row)
            for n, row in enumerate(csv.reader(io.StringIO(text)), start=1)
            if row and not row[0].lstrip().startswith("#")
        ]
    except csv.Error as error:
        raise SpecError(
            f"{path}: This is not valid CSV ({error}); accepted is {kind.accepted}."
        ) from None
    if rows and [c.strip().lower() for c in rows[0][1]] != ["nodes", kind.column]:
        raise SpecError(
            f'{path}: The first line is "{",".join(rows[0][1])[:60]}"; accepted is {kind.accepted}.'
        )
    points = []
    for line, row in rows[1:]:
        try:
            nodes, number = row
            points.append((f"{path} line {line}", float(nodes), float(number)))
        except ValueError:
            raise SpecError(
                f'{path} line {line}: "{",".join(row)[:60]}" is not two numbers; accepted is '
                f"{kind.accepted}."
            ) from None
    return points


def _from_toml(text: str, path: Path) -> Points:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(
            f"{path}: This is not valid TOML ({error}); accepted is {VALUE_HELP}."
        ) from None
    table = data.get("value")
    if set(data) != {"value"} or not isinstance(table, dict):
        raise SpecError(
            f"{path}: The file has the sections {', '.join(data)[:60]}; accepted is {VALUE_HELP}."
        )
    points = []
    for nodes, value in table.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not nodes.isdecimal():
            raise SpecError(
                f'{path}: "{nodes} = {str(value)[:40]}" is not a size and its value; accepted '
                f"is {VALUE_HELP}."
            )
        try:
            points.append((f"{path} [value]", float(nodes), float(value)))
        except OverflowError:  # an integer above 1e308
            raise SpecError(
                f'{path}: "{nodes} = {str(value)[:40]}" is too large; accepted is {VALUE_HELP}.'
            ) from None
    return points


def _from_json(text: str, path: Path) -> Points:
    try:
        pairs = json.loads(text, object_pairs_hook=list)  # keeps sizes that are named twice
    except (ValueError, RecursionError) as error:
        raise SpecError(
            f"{path}: This is not valid JSON ({error}); accepted is {CURVE_HELP}."
        ) from None
    points = []
    for pair in pairs:
        try:
            nodes, rate = pair
            if isinstance(nodes, bool) or isinstance(rate, bool):
                raise ValueError
            points.append((str(path), float(nodes), float(rate)))
        except (TypeError, ValueError, OverflowError):  # OverflowError: an integer above 1e308
            raise SpecError(
                f"{path}: {json.dumps(pair)[:60]} is not a pair of numbers; accepted is "
                f"{CURVE_HELP}."
            ) from None
    return points
