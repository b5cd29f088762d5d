"""The part of ``malletrain show`` on the layout of a job's nodes. Decides the columns."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from malletrain.protocol.views import JobDetail, TriedLayoutView
from malletrain.render.columns import Column, FittedTable
from malletrain.render.text import figure, plain


def layouts(detail: JobDetail) -> list[RenderableType]:
    """Return the part of ``malletrain show`` on the layout of the job's nodes; empty if it is not
    looked for.
    """
    view = detail.layout
    if view is None:
        return []
    head = Text("\nEach node: ", "bold")
    head.append(f"{plain(view.layout)}. ", "default")
    parts: list[RenderableType] = [head, Text(plain(view.sentence))]
    if any(tried.rate is not None for tried in view.tried):
        parts.append(_table(view.tried))
    return parts


def _table(tried: tuple[TriedLayoutView, ...]) -> FittedTable:
    """Return a line for each layout that is or was tried."""
    table = FittedTable(
        Column("PROCESSES", right=True),
        Column("THREADS", right=True),
        Column("LOADER WORKERS", right=True),
        Column("SAMPLES/S", right=True),
        Column("±", right=True, drop=1),
        Column("RESULT"),
    )
    for each in tried:
        table.add_row(
            str(each.processes),
            str(each.threads),
            str(each.loader_workers),
            "" if each.rate is None else figure(each.rate),
            "" if each.half_width is None else figure(each.half_width),
            plain(each.result),
        )
    return table
