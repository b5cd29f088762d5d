"""Sweeps and their trials as tables and as CSV. Decides columns and wording."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from malletrain.render.columns import Column, FittedTable
from malletrain.render.text import plain

STATES = ("complete", "pruned", "running", "fail")


def sweeps(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return the table of ``malletrain sweep status``: a line for each sweep."""
    if not rows:
        return Text("There is no sweep. Begin one with: malletrain sweep run FILE")
    table = FittedTable(
        Column("SWEEP"),
        *(Column(state.upper(), right=True) for state in STATES),
        Column("WANTED", right=True, drop=1),
        Column("BEST", right=True),
        Column("", note=True),
    )
    for row in rows:
        counts = row["trials"]
        table.add_row(
            plain(row["name"]),
            *(str(counts.get(state, 0)) for state in STATES),
            str(row["target_trials"]),
            "" if row["best"] is None else f"{row['best']:.6g}",
            plain(row["sentence"]),
        )
    return table


def trials(rows: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> RenderableType:
    """Return the table of ``malletrain sweep show``: a line for each trial."""
    if not rows:
        return Text("No trial has begun.")
    parameters = list(dict.fromkeys(name for row in rows for name in row["parameters"]))
    table = FittedTable(
        Column("TRIAL", right=True),
        Column("STATE"),
        *(Column(metric.upper(), right=True) for metric in metrics),
        Column("STEP", right=True, drop=2),
        *(Column(name, right=True) for name in parameters),
        Column("JOB", drop=1),
        Column("NODE-HOURS", right=True, drop=3),
        Column("", note=True),
    )
    for row in rows:
        table.add_row(
            str(row["trial"]),
            plain(row["state"]),
            *(_number(row["values"].get(metric)) for metric in metrics),
            "" if row["step"] is None else str(row["step"]),
            *(_number(row["parameters"].get(name)) for name in parameters),
            plain(row["job"]),
            f"{row['node_hours']:.3f}",
            plain(row["note"] or ("the best" if row["best"] else "")),
        )
    return table


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else str(value)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return CSV: a line of headings, then one for each trial; each metric, then each parameter,
    has a column."""
    metrics = list(dict.fromkeys(name for row in rows for name in row["values"]))
    parameters = list(dict.fromkeys(name for row in rows for name in row["parameters"]))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    facts = ("trial", "state", "job", "step", "node_hours", "best", "note")
    writer.writerow([*facts, *metrics, *parameters])
    for row in rows:
        cells = [row[fact] for fact in facts]
        cells += [row["values"].get(metric) for metric in metrics]
        cells += [row["parameters"].get(name) for name in parameters]
        writer.writerow("" if value is None else value for value in cells)
    return out.getvalue()
