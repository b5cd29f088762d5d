"""The live screen of ``malletrain top`` and ``malletrain demo``: nodes and their jobs, throughput
per job, events.

:class:`Screen` keeps the short history that a sparkline needs and converts the latest views to one
renderable. It sends no requests and does not draw. :class:`Follower` updates it from a daemon: one
look requests everything that changed. The caller decides how often.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from malletrain.protocol.counting import counted
from malletrain.protocol.views import EventView, JobView, NodeView, StatusView
from malletrain.render import tables
from malletrain.render.columns import Column, FittedTable, shorten
from malletrain.render.palette import STATE_STYLES, colours
from malletrain.render.text import bar, clock, plain, rate, spark

HISTORY = 240
SPARK_WIDTH, SPARK_NARROW = 24, 10
"""Width of a sparkline on a wide terminal, and on others."""
CELL_WIDTH = 24
"""Width of one node in the grid."""
MAX_NAMED_NODES = 48
"""Maximum number of nodes for the grid of names; with more, the grid shows one character
per node."""
SIGNS = {
    "job": "█",
    "free": "▒",
    "leasing": "░",
    "leaving": "▚",
    "idle": "·",
    "busy": "x",
    "sick": "!",
    "slow": "~",
}
"""Node state → character, so that the grid can be read without colour."""
ORDER = ("running", "profiling", "suspended", "queued")
"""Order of jobs by state; ended jobs come last, the newest first."""
MIN_EVENT_LINES = 2
"""Minimum number of lines of events, on a small terminal."""
MIN_KIND_WIDTH = 110
"""Minimum width at which an event is shown with its kind."""
KEYS = "q quit   ↑ ↓ more jobs   a all nodes"
JOB_COLUMNS = (
    Column("JOB"),
    Column("NAME", drop=1, least=12, middle=True),
    Column("STATE", drop=2),
    Column("NODES", drop=3),
    Column("RATE", drop=5, right=True),
    Column("", drop=7),
    Column("SAMPLES", drop=4, right=True),
    Column("RESCALES", drop=8, right=True),
    Column("METRICS", drop=6, least=16),
)


class Screen:
    """The latest views, and the throughput of each job at the last polls."""

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
        """Store the views of one poll of the daemon; ``events`` are only the new ones."""
        self.status, self.jobs, self.nodes, self.note = status, tuple(jobs), tuple(nodes), ""
        self.events.extend(events)
        ids = {j.id for j in jobs}
        self.history = {k: v for k, v in self.history.items() if k in ids}
        for j in jobs:
            self.history.setdefault(j.id, deque(maxlen=HISTORY)).append(j.rate)

    def unreachable(self, sentence: str) -> None:
        """Keep the last views and show that the daemon did not answer."""
        self.note = sentence

    def render(
        self, width: int = 110, height: int = 40, *, above: int = 0, keys: bool = False
    ) -> RenderableType:
        """Return the whole screen for a terminal of ``width`` columns and ``height`` lines.

        Args:
            above: number of jobs above the visible ones.
            keys: whether the last line shows the keys.
        """
        if self.status is None:
            return Text(plain(self.note) or "Waiting for the daemon …")
        head = Text()
        if self.title:
            head.append(plain(self.title) + "\n", "bold")
        head.append_text(tables.headline(self.status))
        if self.note:
            head.append(f"\n{plain(self.note)}", "bold red")
        foot = Text(KEYS, "dim") if keys else Text()
        room = height - len(head.wrap(Console(width=width), width)) - keys - 3  # three titles
        grid, lines = self.grid(width, max(2, room // 4))
        room -= lines
        ordered = self.in_order()
        shown = max(1, min(len(ordered), room - MIN_EVENT_LINES - 1))
        if shown < len(ordered):
            shown = max(1, shown - 1)  # the line with the number of the others
        above = min(above, len(ordered) - shown)
        rows = shown + (shown < len(ordered)) + 1
        layout = Layout()
        layout.split_column(
            Layout(head, size=height - room - lines - keys - 3),
            Layout(Group(_title("nodes"), grid), size=lines + 1),
            Layout(
                Group(_title("jobs"), self.throughput(ordered, above, shown, width)), size=rows + 1
            ),
            Layout(
                Group(_title("events"), self.last_events(max(1, room - rows), width)),
                ratio=1,
                minimum_size=2,
            ),
            *([Layout(foot, size=1)] if keys else []),
        )
        return layout

    def in_order(self) -> list[JobView]:
        """Return the jobs in the screen's order: running, waiting, ended."""
        live = [j for j in self.jobs if j.state not in tables.ENDED]
        ended = [j for j in self.jobs if j.state in tables.ENDED]
        live.sort(key=lambda j: (ORDER.index(j.state) if j.state in ORDER else 0, j.submitted))
        return live + sorted(ended, key=lambda j: -(j.ended or 0.0))

    def _colours(self) -> dict[str, str]:
        colour_of = colours(j.id for j in sorted(self.jobs, key=lambda j: (j.submitted, j.id)))
        return colour_of | {j.name: colour_of[j.id] for j in self.jobs}

    def _names(self) -> dict[str, str]:
        return {j.id: j.name for j in self.jobs}

    def grid(self, width: int, most: int) -> tuple[RenderableType, int]:
        """Return the grid of nodes with their jobs, and its number of lines, at most ``most``."""
        if not self.nodes:
            return Text("No node is held and none is idle: others use the machine.", "dim"), 1
        colour, names = self._colours(), self._names()

        def style(n: NodeView) -> str:
            return colour.get(n.job, "") if n.state == "job" else STATE_STYLES.get(n.state, "")

        across = max(1, (width + 2) // (CELL_WIDTH + 2))
        lines = math.ceil(len(self.nodes) / across)
        if len(self.nodes) > MAX_NAMED_NODES or lines > most:
            return self._signs(width, most, style)
        grid = Table.grid(padding=(0, 2, 0, 0))
        for _ in range(across):
            grid.add_column(width=CELL_WIDTH, no_wrap=True)
        cells = []
        for n in self.nodes:
            cell = Text(SIGNS.get(n.state, "?") * 2 + " ", style(n))
            cell.append(f"{plain(n.node):<6} ", "bold")
            if n.gone_in_s is not None:
                cell.append(f"leaving {max(0.0, n.gone_in_s):.0f} s", "red")
            else:
                word = plain(names.get(n.job, n.job)) if n.state == "job" else tables.state(n.state)
                room = max(4, CELL_WIDTH - cell.cell_len)
                cell.append_text(shorten(Text(str(word), style(n)), room, middle=True))
            cells.append(cell)
        for k in range(0, len(cells), across):
            grid.add_row(*cells[k : k + across])
        return grid, lines

    def _signs(
        self, width: int, most: int, style: Callable[[NodeView], str]
    ) -> tuple[RenderableType, int]:
        """Return the grid with one character per node, and its number of lines."""
        states = {n.state for n in self.nodes}
        words = (f"{sign} {tables.state(word)}" for word, sign in SIGNS.items() if word in states)
        text = shorten(Text("  ".join(words), "dim"), width)
        across = min(64, width)
        lines = math.ceil(len(self.nodes) / across)
        shown = len(self.nodes) if lines < most else max(0, (most - 2)) * across
        for k, n in enumerate(self.nodes[:shown]):
            text.append("\n" if k % across == 0 else "")
            text.append(SIGNS.get(n.state, "?"), style(n))
        if shown < len(self.nodes):
            text.append(f"\n… and {counted(len(self.nodes) - shown, 'more node')}", "dim")
        return text, text.plain.count("\n") + 1

    def throughput(
        self, ordered: Sequence[JobView], above: int, shown: int, width: int
    ) -> RenderableType:
        """Return a line per job with its throughput over the last polls, and the number of other
        jobs.

        Args:
            ordered: all jobs.
            above: number of jobs above the visible ones.
            shown: number of jobs with a line.
        """
        if not ordered:
            return Text("No jobs yet.", "dim")
        colour = self._colours()
        history = SPARK_WIDTH if width > MIN_KIND_WIDTH else SPARK_NARROW
        table = FittedTable(*JOB_COLUMNS, rule=False)
        for j in ordered[above : above + shown]:
            table.add_row(
                plain(j.id),
                Text(plain(j.name), colour[j.id]),
                tables.state(j.state),
                Text(bar(len(j.nodes), j.max_nodes, 8), colour[j.id]),
                rate(j.rate) if j.nodes else "",
                Text(spark(list(self.history.get(j.id, ())), history), colour[j.id]),
                tables.work_done(j),
                str(j.rescales),
                _last(j),
            )
        others = (*ordered[:above], *ordered[above + shown :])
        if not others:
            return table
        states = Counter(j.state for j in others)
        parts = ", ".join(f"{n} {word}" for word, n in states.items())
        return Group(table, Text(f"… and {len(others)} more: {parts}", "dim", no_wrap=True))

    def last_events(self, lines: int, width: int) -> RenderableType:
        """Return the newest ``lines`` events, the newest last."""
        names = self._names()
        newest = []
        for e in list(self.events)[-lines:]:
            line = tables.EventLine(e, names).line if width >= MIN_KIND_WIDTH else _brief(e, names)
            newest.append(shorten(line, width))
        return Group(*newest) if newest else Text("Nothing happened yet.", "dim")


def _title(word: str) -> Rule:
    return Rule(Text(word, "bold"), align="left", style="dim")


def _brief(e: EventView, names: Mapping[str, str]) -> Text:
    """Return an event in short form: time, job or node, sentence."""
    line = Text(f"{clock(e.time)}  ", "dim")
    who = shorten(Text(plain(names.get(e.job, e.job) or e.node), "bold"), 14, middle=True)
    line.append_text(who)
    line.append(" " * (14 - who.cell_len + 1))
    line.append(plain(e.sentence), "red" if e.kind in tables.BAD_NEWS else "default")
    return line


def _last(j: JobView) -> Text:
    """Return the reason why a waiting job waits, else its metrics."""
    if j.reason and j.state not in ("running", "completed"):
        return Text(plain(j.reason), "dim")
    return Text(tables.metrics(j.metrics))


INITIAL_EVENTS = 200
"""Number of past events that the first look requests."""
PAGE = 1000


class FollowSource(Protocol):
    """Requests of a poll; :class:`malletrain.client.Connection` implements it."""

    def status(self) -> StatusView: ...
    def jobs(self) -> list[JobView]: ...
    def nodes(self, *, explain: bool = False) -> list[NodeView]: ...
    def events(
        self, *, since: int = 0, limit: int = 500, job: str | None = None, wait_s: float = 0.0
    ) -> list[EventView]: ...


@dataclass(frozen=True)
class PollAnswers:
    """The daemon's answers at one poll."""

    status: StatusView
    """The daemon and the machine."""
    jobs: list[JobView]
    """All jobs."""
    nodes: list[NodeView]
    """Nodes on the screen."""
    events: list[EventView]
    """New events."""


class Follower:
    """Keeps ``screen`` up to date. ``client`` may be replaced after a restart of the daemon; events
    continue from the last position. ``all_nodes``: whether to show the nodes that the main
    scheduler uses, too.
    """

    def __init__(self, screen: Screen, client: FollowSource, *, all_nodes: bool = False) -> None:
        self.screen = screen
        self.client = client
        self.all_nodes = all_nodes
        self.since = -INITIAL_EVENTS
        """Number of the last event read; negative: number of newest events to start with."""

    def update(self) -> list[EventView]:
        """Send the requests once and update the screen; return the new events. Raises the client's
        errors.
        """
        seen = self.ask()
        self.show(seen)
        return seen.events

    def ask(self) -> PollAnswers:
        """Send the requests once without a change of the screen, which is safe in another thread.
        Raises the client's errors.
        """
        status, jobs, nodes = (
            self.client.status(),
            self.client.jobs(),
            self.client.nodes(explain=self.all_nodes),
        )
        fresh: list[EventView] = []
        while page := self.client.events(since=self.since, limit=PAGE):
            fresh += page
            self.since = page[-1].seq
            if len(page) < PAGE:
                break
        return PollAnswers(status, jobs, nodes, fresh)

    def show(self, seen: PollAnswers) -> None:
        """Update the screen."""
        self.screen.update(seen.status, seen.jobs, seen.nodes, seen.events)
