"""Encodes frozen dataclasses as rows of tables, and decodes them.

Decides which columns are JSON, and how invalid text is stored. :mod:`malletrain.store.schema` has
the tables, :mod:`malletrain.store.records` the dataclasses. (A class that SQLAlchemy maps cannot be
frozen, and belongs to a session.)
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from malletrain.store.records import (
    CurveRow,
    EventRow,
    GoalRow,
    JobRow,
    LayoutRow,
    LayoutSearchRow,
    LeaseRow,
    MetricRow,
    NodeSpanRow,
    ObservationRow,
    ProfileRow,
    RescaleRow,
    ServiceRow,
    ServiceStartsRow,
    TaskRow,
)

Row = TypeVar(
    "Row",
    JobRow,
    LeaseRow,
    EventRow,
    ObservationRow,
    RescaleRow,
    ProfileRow,
    CurveRow,
    LayoutSearchRow,
    LayoutRow,
    MetricRow,
    GoalRow,
    NodeSpanRow,
    ServiceRow,
    ServiceStartsRow,
    TaskRow,
)

Named = TypeVar("Named", JobRow, LeaseRow)
"""Rows with an id."""

_JSON = frozenset(
    {
        "planned_nodes",
        "members",
        "metrics",
        "notices",
        "snapshot",
        "data",
        "phases",
        "step_times",
        "learned",
        "interruptions",
        "arguments",
        "search",
        "layout",
        "facts",
        "lasting_values",
        "durations",
    }
)
NAN = -sys.float_info.max
"""Stored instead of NaN in the column of a metric's values, because SQLite would store NULL."""
_TUPLES = frozenset(
    {"planned_nodes", "members", "notices", "interruptions", "arguments", "durations"}
)


def is_json(column: str) -> bool:
    """Return whether a column has JSON, and not text that may look like it."""
    return column in _JSON or column == "spec"


def encode(row: Any) -> dict[str, Any]:
    """Return the columns of ``row``."""
    return encode_values({name: getattr(row, name) for name in field_names(type(row))})


def encode_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of some of a row's fields."""
    return {name: _encode_value(name, value) for name, value in values.items()}


def stored_text(text: str) -> str:
    """Return the text as it is stored. Columns may have output of jobs, so invalid characters are
    replaced; otherwise they would make the transaction fail.
    """
    clean = str(text).encode("utf-8", "replace").decode()
    return clean.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _encode_value(name: str, value: Any) -> Any:
    if name == "metrics":
        value = {key: v if math.isfinite(v) else str(v) for key, v in value.items()}
    if name == "value" and math.isnan(value):
        return NAN
    if name in _JSON:
        return json.dumps(list(value) if name in _TUPLES else dict(value), separators=(",", ":"))
    if isinstance(value, str):
        return stored_text(value)
    return value


def decode(kind: type[Row], columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[Row]:
    """Decode rows of the database.

    Args:
        kind: class of the rows.
        columns: names of the columns that were read; those without a field are ignored.
        rows: values of each row, in the order of the columns.

    """
    names = field_names(kind)
    positions = [(columns.index(name), _decoder(name)) for name in names]
    return [
        kind(
            *[
                row[index] if decoder is None else decoder(row[index])
                for index, decoder in positions
            ]
        )
        for row in rows
    ]


def field_names(kind: type[Any]) -> tuple[str, ...]:
    """Return the names of a class's fields, in the order of its constructor."""
    return tuple(field.name for field in fields(kind))


def _decoder(name: str) -> Callable[[Any], Any] | None:
    """Return the function that decodes a column; None if its value is stored as it is."""
    if name == "metrics":
        return lambda text: {key: float(v) for key, v in json.loads(text).items()}
    if name == "value":
        return lambda value: math.nan if value == NAN else value
    if name in _TUPLES:
        return lambda text: tuple(json.loads(text))
    return json.loads if name in _JSON else None


def decode_values(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return some of a row's fields, decoded from their columns."""
    return {
        name: value if (read := _decoder(name)) is None else read(value)
        for name, value in columns.items()
    }
