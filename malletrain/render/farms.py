"""Farms for ``malletrain tasks`` and ``malletrain show``: counts, a line for each task, rows of
CSV.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from malletrain.config.units import show_duration
from malletrain.protocol.farm import INDEX
from malletrain.protocol.views import TasksView, TaskView
from malletrain.render.columns import Column, FittedTable
from malletrain.render.text import clock, date, plain, rate

STYLES = {
    "waiting": "yellow",
    "running": "green",
    "done": "bold green",
    "failed": "bold red",
    "cancelled": "magenta",
}
"""State of a task → rich style."""
RESULT_COLUMNS = ("state", "exit_code", "tries", "node", "started", "ended", "seconds", "log")
"""Columns of CSV after the values of a task; the times are in seconds since the epoch."""
NOTE_CHARACTERS = 300
"""Characters of the end of a failed task's output that a table shows."""


def summary(view: TasksView, now: float) -> Text:
    """Return one line: how many tasks are in which state, how fast they go, and when the farm
    ends.
    """
    text = Text()
    for state, style in STYLES.items():
        if count := view.counts.get(state, 0):
            text.append(f"{', ' if text.plain else ''}{count:,} ")
            text.append(state, style)
    text.append(f" of {view.total:,} tasks.")
    if view.rate > 0:
        text.append(f" {rate(view.rate)}")
        if view.ends is not None:
            remaining_s = max(0.0, view.ends - now)
            text.append(f"; at this rate done in {show_duration(remaining_s)} ({date(view.ends)}).")
        else:
            text.append(".")
    return text


def tasks(view: TasksView, now: float) -> RenderableType:
    """Return a line for each task of the view; below a failed one the end of its output."""
    table = FittedTable(
        Column("TASK", right=True),
        Column("VALUES", least=12),
        Column("STATE"),
        Column("EXIT", right=True),
        Column("TRIES", right=True, drop=4),
        Column("NODE", drop=2, least=8, middle=True),
        Column("STARTED", drop=3),
        Column("TIME", right=True, drop=1),
        Column("", note=True),
    )
    for task in view.tasks:
        table.add_row(
            str(task.number),
            values(view.columns, task),
            Text(task.state, STYLES.get(task.state, "")),
            "" if task.exit_code is None else str(task.exit_code),
            str(task.tries or ""),
            plain(task.node),
            clock(task.started) if task.started else "",
            "" if (s := seconds(task, now)) is None else show_duration(s),
            last_words(task),
        )
    return table


def farm(view: TasksView, now: float) -> RenderableType:
    """Return the part of ``malletrain show`` about the tasks of a farm."""
    head = Text("\nTasks: ", "bold")
    head.append_text(summary(view, now))
    parts: list[RenderableType] = [head]
    if view.slowest:
        slowest = ", ".join(
            f"{task.number} ({show_duration(seconds(task, now) or 0.0)} on {plain(task.node)})"
            for task in view.slowest
        )
        parts.append(Text(f"Longest running: {slowest}"))
    parts += [Text(plain(sentence), "yellow") for sentence in view.failing]
    unfinished = view.counts.get("waiting", 0) + view.counts.get("running", 0)
    if view.counts.get("failed") and unfinished:  # a farm that has ended says so by its reason
        parts.append(Text(f"malletrain tasks {view.job} --failed lists the failed tasks."))
    return Group(*parts)


def values(columns: Sequence[str], task: TaskView) -> str:
    """Return the values of a task on one line; with several columns, with their names."""
    if len(columns) == 1:
        text = task.values[0]
    else:
        text = " ".join(f"{n}={v}" for n, v in zip(columns, task.values, strict=True))
    return " ".join(plain(text).split())


def seconds(task: TaskView, now: float) -> float | None:
    """Return for how long a task runs or ran; None if it has not started."""
    if task.started is None:
        return None
    end = task.ended if task.ended is not None else now if task.state == "running" else None
    return None if end is None else max(0.0, end - task.started)


def last_words(task: TaskView) -> str:
    """Return the last line of a failed task's output."""
    lines = [line for line in plain(task.tail).splitlines() if line.strip()]
    return lines[-1].strip()[-NOTE_CHARACTERS:] if lines and task.state == "failed" else ""


def csv_header(columns: Sequence[str]) -> list[str]:
    """Return the header of the results as CSV. The values have the names that ``malletrain map``
    read, and ``index`` is the number of the task, so that it reads the rows again.
    """
    own = list(columns) if INDEX in columns else [INDEX, *columns]
    return [*own, *(f"task_{name}" if name in own else name for name in RESULT_COLUMNS)]


def csv_row(columns: Sequence[str], task: TaskView, now: float) -> list[object]:
    """Return a task as a row of CSV."""
    own = list(task.values) if INDEX in columns else [str(task.number), *task.values]
    run_s = seconds(task, now)
    return [
        *own,
        task.state,
        "" if task.exit_code is None else task.exit_code,
        task.tries,
        task.node,
        "" if task.started is None else f"{task.started:.3f}",
        "" if task.ended is None else f"{task.ended:.3f}",
        "" if run_s is None else f"{run_s:.3f}",
        task.log,
    ]
