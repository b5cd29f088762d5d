"""A frozen dataclass as the row of a table, and back.

Decides which columns are JSON and what happens to text that is none. Tables and dataclasses are
:mod:`malletrain.store.schema`'s.
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
    LeaseRow,
    MetricRow,
    NodeSpanRow,
    ObservationRow,
    ProfileRow,
    RescaleRow,
    ServiceRow,
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
    MetricRow,
    GoalRow,
    NodeSpanRow,
    ServiceRow,
)

Named = TypeVar("Named", JobRow, LeaseRow)
"""The rows that have an id."""

_JSON = frozenset(
    {
        "planned_nodes",
        "members",
        "metrics",
        "notices",
        "snapshot",
        "data",
        "phases",
        "learned",
        "interruptions",
    }
)
NAN = -sys.float_info.max
"""In the column of a metric's values: NaN, which SQLite would make NULL."""
_TUPLES = frozenset({"planned_nodes", "members", "notices", "interruptions"})


def encode(row: Any) -> dict[str, Any]:
    """The columns of ``row``."""
    return encode_values({name: getattr(row, name) for name in field_names(type(row))})


def encode_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of some of a row's fields."""
    return {name: _encode_value(name, value) for name, value in values.items()}


def stored_text(text: str) -> str:
    """As a text is stored. Output of jobs ends up in columns: what is no text must cost a character
    and not the transaction.
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
    """The rows of this kind, of each of which these columns were read, in this order; columns it
    has no field for are left out.
    """
    names = field_names(kind)
    places = [(columns.index(name), _reader(name)) for name in names]
    return [
        kind(*[row[at] if read is None else read(row[at]) for at, read in places]) for row in rows
    ]


def field_names(kind: type[Any]) -> tuple[str, ...]:
    """The fields of a kind of row, in the order in which it is made of them."""
    return tuple(field.name for field in fields(kind))


def _reader(name: str) -> Callable[[Any], Any] | None:
    """How the column of this name becomes its field; None: it is it."""
    if name == "metrics":
        return lambda text: {key: float(v) for key, v in json.loads(text).items()}
    if name == "value":
        return lambda value: math.nan if value == NAN else value
    if name in _TUPLES:
        return lambda text: tuple(json.loads(text))
    return json.loads if name in _JSON else None


def decode_values(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Some of a row's fields, of their columns."""
    return {
        name: value if (read := _reader(name)) is None else read(value)
        for name, value in columns.items()
    }
