"""``malletrain usage`` as a table and as CSV. Decides columns, wording and which rows are added
up.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import msgspec
from rich.console import RenderableType
from rich.text import Text

from malletrain.protocol.views import UsageView
from malletrain.render.columns import Column, FittedTable
from malletrain.render.text import count, plain

BY = {"user": "user", "account": "account", "class": "node_class", "month": "month"}
"""Key of ``--by`` → field of the rows that it distinguishes."""
ALL = "all"
"""Value of the fields over which rows were added up."""
HOURS = (
    ("LEASED", "leased_nh", 1),
    ("TRAINED", "trained_nh", 2),
    ("STARTS", "starting_nh", 5),
    ("RESCALES", "rescaling_nh", 6),
    ("PREEMPTED", "preempted_nh", 7),
    ("NO SAMPLES", "silent_nh", 3),
    ("NO JOB", "unused_nh", 4),
)
"""Heading, field and drop priority of a column on a narrow terminal."""
CHARGES = (("CHARGED", "charged_nh", 8), ("GPU-H", "gpu_h", 9))
"""Heading, field and drop priority of columns for sites with slots."""
SUMS = (*(field for _, field, _ in HOURS), "samples")


def added_up(rows: Sequence[UsageView], by: Sequence[str]) -> list[UsageView]:
    """Return the rows added up by the fields ``by`` (keys of BY). The energy of a sum is known if
    that of all its parts is.
    """
    fields = {BY[each] for each in by}
    rows_by_key: dict[tuple[str, ...], UsageView] = {}
    for row in rows:
        key = tuple(getattr(row, f) if f in fields else ALL for f in BY.values())
        row = msgspec.structs.replace(row, **dict(zip(BY.values(), key, strict=True)))
        if (before := rows_by_key.get(key)) is not None:
            sums = {field: getattr(before, field) + getattr(row, field) for field in SUMS}
            complete = before.kwh is not None and row.kwh is not None
            kwh = (before.kwh or 0.0) + (row.kwh or 0.0) if complete else None
            charges = {field: _known_sum(before, row, field) for _, field, _ in CHARGES}
            row = msgspec.structs.replace(row, **sums, **charges, kwh=kwh)
        rows_by_key[key] = row
    return [rows_by_key[key] for key in sorted(rows_by_key)]


def _known_sum(one: UsageView, other: UsageView, field: str) -> float | None:
    """Return the sum of the values that are known; None if neither is."""
    values = [v for v in (getattr(one, field), getattr(other, field)) if v is not None]
    return sum(values) if values else None


def _amount(value: float) -> str:
    """Return an amount with tenths; below one with thousandths, so that some seconds do not show
    as 0."""
    return f"{value:,.1f}" if value >= 1 or not value else f"{value:.3f}"


def table(rows: Sequence[UsageView], by: Sequence[str]) -> RenderableType:
    """Return a table of node-hours, with a last line for the sums. What slots count, and their
    GPU-hours, are columns if there are slots.
    """
    if not rows:
        return Text("No node was leased in that time.")
    charges = CHARGES if any(row.gpu_h is not None for row in rows) else ()
    hours = (*HOURS[:1], *charges, *HOURS[1:])
    table = FittedTable(
        *(Column(each.upper()) for each in by),
        *(Column(head, drop=drop, right=True) for head, _, drop in hours),
        Column("SAMPLES", drop=3, right=True),
        Column("KWH", drop=2, right=True),
    )
    total = added_up(rows, ())
    for row in (*rows, *(total if len(rows) > 1 else ())):
        table.add_row(
            *(plain(getattr(row, BY[each])) for each in by),
            *("" if (v := getattr(row, f)) is None else _amount(v) for _, f, _ in hours),
            count(row.samples),
            "?" if row.kwh is None else _amount(row.kwh),
        )
    return table


def as_csv(rows: Sequence[UsageView]) -> str:
    """Return CSV: a line of headings, then one for each row; an unknown energy is empty."""
    out = io.StringIO()
    fields = UsageView.__struct_fields__
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(fields)
    for row in rows:
        values = [getattr(row, field) for field in fields]
        writer.writerow(
            f"{v:.6g}" if isinstance(v, float) else "" if v is None else v for v in values
        )
    return out.getvalue()
