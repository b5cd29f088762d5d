"""A frozen dataclass as the row of a table, and back.

Decides which columns are JSON and what happens to text that is none. Tables and dataclasses are
:mod:`malletrain.store.schema`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
_TUPLES = frozenset({"planned_nodes", "members", "notices", "interruptions"})


def encode(row: Any) -> dict[str, Any]:
    """The columns of ``row``."""
    return encode_values({field.name: getattr(row, field.name) for field in fields(row)})


def encode_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of some of a row's fields."""
    return {name: _encode_value(name, value) for name, value in values.items()}


def _encode_value(name: str, value: Any) -> Any:
    if name in _JSON:
        return json.dumps(list(value) if name in _TUPLES else dict(value), separators=(",", ":"))
    if isinstance(value, str):
        # Output of jobs ends up here: what is no text must cost a character and not the
        # transaction.
        return (
            str(value)
            .encode("utf-8", "replace")
            .decode()
            .replace("\0", "\N{REPLACEMENT CHARACTER}")
        )
    return value


def decode(kind: type[Row], row: Mapping[Any, Any]) -> Row:
    """The row of this kind with these columns; columns it has no field for are left out."""
    return kind(**decode_values({field.name: row[field.name] for field in fields(kind)}))


def decode_values(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Some of a row's fields, of their columns."""
    values = {}
    for name, value in columns.items():
        if name in _JSON:
            value = json.loads(value)
            value = tuple(value) if name in _TUPLES else value
        values[name] = value
    return values
