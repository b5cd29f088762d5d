"""The live screen of ``malletrain top`` and ``malletrain demo``: nodes and who is on them,
throughput per job, events.

:class:`Screen` keeps the short history that a sparkline needs and turns the latest views into one
renderable. It does not ask the daemon and does not draw by itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from malletrain.protocol.views import EventView, JobView, NodeView, StatusView
from malletrain.render import tables
from malletrain.render.palette import STATE_STYLES, colours
from malletrain.render.text import bar, count, plain, rate, spark

HISTORY = 240
SPARK_WIDTH = 24
"""Columns of a sparkline on a wide terminal."""
CELL_WIDTH = 18
CELLS_UP_TO = 48
"""With more nodes than this the grid shows one character a node."""
SIGNS = {"job": "█", "free": "▒", "leasing": "░", "leaving": "▚", "idle": "·", "busy": "–"}
"""Node state → character, so that the grid can be read without colour."""


class Screen:
    """The latest views, and per job the throughput of the last polls."""

    def __init__(self, title: str = "", events: int = 200) -> None:
        self.title = title
        self.status: StatusView | None = None
        self.jobs: tuple[JobView, ...] = ()
        self.nodes: tuple[NodeView, ...] = ()
        self.events: deque[EventView] = deque(maxlen=events)
        self.history: dict[str, deque[float]] = {}
        self.note = ""

    def update(
        self,
        status: StatusView,
        jobs: Sequence[JobView],
        nodes: Sequence[NodeView],
        events: Sequence[EventView] = (),
    ) -> None:
        """Take in one poll of the daemon; ``events`` are the new ones only."""
        self.status, self.jobs, self.nodes, self.note = status, tuple(jobs), tuple(nodes), ""
        self.events.extend(events)
        known = {j.id for j in jobs}
        self.history = {k: v for k, v in self.history.items() if k in known}
        for j in jobs:
            self.history.setdefault(j.id, deque(maxlen=HISTORY)).append(j.rate)

    def unreachable(self, sentence: str) -> None:
        """The daemon did not answer: keep the last picture and say so."""
        self.note = sentence

    def render(self, width: int = 110, height: int = 40) -> RenderableType:
        """The whole screen for a terminal of ``width`` columns and ``height`` lines."""
        if self.status is None:
            return Text(plain(self.note) or "Waiting for the daemon …")
        head = Text()
        if self.title:
            head.append(plain(self.title) + "\n", "bold")
        head.append_text(tables.headline(self.status))
        if self.note:
            head.append(f"\n{plain(self.note)}", "bold red")
        grid = self.grid()
        live = [j for j in self.jobs if j.state not in tables.ENDED]
        ended = [j for j in self.jobs if j.state in tables.ENDED]
        room = max(3, height // 3)
        shown = (live + ended[::-1])[:room]
        shown.sort(key=lambda j: j.submitted)
        rows = {
            "head": head.plain.count("\n") + 1,
            "nodes": self._grid_lines() + 2,
            "jobs": len(shown) + 4,
        }
        layout = Layout()
        layout.split_column(
            Layout(head, name="head", size=rows["head"]),
            Layout(_panel(grid, "nodes"), name="nodes", size=rows["nodes"]),
            Layout(_panel(self.throughput(shown, width), "jobs"), name="jobs", size=rows["jobs"]),
            Layout(name="events", ratio=1, minimum_size=3),
        )
        lines = max(1, height - sum(rows.values()) - 2)
        layout["events"].update(_panel(self.last_events(lines), "events"))
        return layout

    def _grid_lines(self) -> int:
        if len(self.nodes) <= CELLS_UP_TO:
            return max(1, math.ceil(len(self.nodes) / 4))
        return 1 + math.ceil(len(self.nodes) / 64)

    def _colours(self) -> dict[str, str]:
        made = colours(j.id for j in sorted(self.jobs, key=lambda j: (j.submitted, j.id)))
        return made | {j.name: made[j.id] for j in self.jobs}

    def _names(self) -> dict[str, str]:
        return {j.id: j.name for j in self.jobs}

    def grid(self) -> RenderableType:
        """Who is on which node."""
        if not self.nodes:
            return Text("No idle and no leased node: the main scheduler uses everything.", "dim")
        colour, names = self._colours(), self._names()

        def style(n: NodeView) -> str:
            return colour.get(n.job, "") if n.state == "job" else STATE_STYLES.get(n.state, "")

        if len(self.nodes) > CELLS_UP_TO:
            text = Text("  ".join(f"{sign} {word}" for word, sign in SIGNS.items()) + "\n", "dim")
            for k, n in enumerate(self.nodes):
                text.append(SIGNS.get(n.state, "?"), style(n))
                if k % 64 == 63:
                    text.append("\n")
            return text
        made = Table.grid(padding=(0, 2))
        for _ in range(4):
            made.add_column(width=CELL_WIDTH + 6, no_wrap=True)
        cells = []
        for n in self.nodes:
            cell = Text(no_wrap=True, overflow="ellipsis")
            cell.append(SIGNS.get(n.state, "?") * 2 + " ", style(n))
            cell.append(f"{plain(n.node):<6} ", "bold")
            cell.append(plain(names.get(n.job, n.job)) if n.state == "job" else n.state, style(n))
            if n.leaving_in_s is not None:
                cell.append(f" {max(0.0, n.leaving_in_s):.0f} s", "red")
            cells.append(cell)
        for k in range(0, len(cells), 4):
            made.add_row(*cells[k : k + 4])
        return made

    def throughput(self, shown: Sequence[JobView], width: int = 110) -> RenderableType:
        """A line per job with its throughput over the last polls."""
        if not shown:
            return Text("No jobs yet.", "dim")
        colour = self._colours()
        history = max(6, min(SPARK_WIDTH, width - 88))
        numbers = ("RATE", "SAMPLES", "RESCALES")
        made = tables.table(
            "JOB",
            "STATE",
            "NODES",
            "RATE",
            "",
            "SAMPLES",
            "RESCALES",
            "METRICS",
            right=numbers,
            wrap=("METRICS",),
        )
        for j in shown:
            made.add_row(
                Text(plain(j.name), colour[j.id]),
                tables.state(j.state),
                Text(bar(len(j.nodes), j.min_nodes, j.max_nodes), colour[j.id]),
                rate(j.rate),
                Text(spark(list(self.history.get(j.id, ())), history), colour[j.id]),
                count(j.samples),
                str(j.rescales),
                _last(j),
            )
        return made

    def last_events(self, lines: int) -> RenderableType:
        """The newest ``lines`` events, the newest last."""
        names = self._names()
        newest = [tables.event(e, names) for e in list(self.events)[-lines:]]
        for line in newest:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*newest) if newest else Text("Nothing happened yet.", "dim")


def _panel(content: RenderableType, title: str) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="dim")


def _last(j: JobView) -> Text:
    """What a waiting job waits for, else its metrics; on one line, shortened where the screen is
    narrow.
    """
    waits = bool(j.reason) and j.state not in ("running", "completed")
    text = (
        Text(plain(j.reason), "dim")
        if waits
        else Text(tables.metrics(j.metrics) if j.metrics else "")
    )
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
