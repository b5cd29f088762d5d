"""Watches a demo: shows its progress and records data for the account. Continues without the
daemon.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from malletrain.client import Connection
from malletrain.protocol.views import EventView, JobView
from malletrain.render import tables
from malletrain.render.follow import Follower
from malletrain.render.live import Screen
from malletrain.render.text import count, rate

LINE_INTERVAL_S = 10.0
"""With ``--plain``, time between two lines about the jobs, seconds."""


class DemoWatcher:
    """Requests the state from the daemon regularly; keeps all events, and the samples of each job
    over time. ``say`` shows a sentence of the demo itself.
    """

    def __init__(self, terminal: Console, client: Connection, title: str, plain: bool) -> None:
        self.terminal = terminal
        self.plain = plain
        self.screen = Screen(title)
        self.client = client
        self.follower = Follower(self.screen, client, all_nodes=True)
        self.follower.since = 0
        self.events: list[EventView] = []
        self.counts: dict[str, list[tuple[float, float]]] = {}
        self.outages: list[tuple[float, float]] = []
        self._line_due = 0.0
        self._live: Live | None = None

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        """Show the live screen in the body, unless plain."""
        if self.plain:
            yield
            return
        with Live(console=self.terminal, screen=True, auto_refresh=False) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def say(self, sentence: str) -> None:
        """Show a sentence of the demo itself."""
        if self._live is not None:
            self.screen.note = sentence
            self._draw()
        else:
            self.terminal.print(
                Text(f"{time.strftime('%H:%M:%S')}  {sentence}", "bold"), soft_wrap=True
            )

    def update(self) -> list[JobView]:
        """Send the requests once and show the news. Return the jobs. Raises ClientError if the
        daemon does not answer.
        """
        fresh = self.follower.update()
        now = time.time()
        self.events += fresh
        for j in self.screen.jobs:
            self.counts.setdefault(j.name, []).append((now, j.samples))
        if self.plain:
            self._lines(fresh, now)
        self._draw()
        return list(self.screen.jobs)

    def away(self, restart: Callable[[], Connection]) -> None:
        """Record that the daemon is down until ``restart`` returns."""
        began = time.time()
        self.client.close()
        self.client = self.follower.client = restart()
        self.outages.append((began, time.time()))

    def pause(self, seconds: float) -> None:
        """Wait; the screen stays visible."""
        self._draw()
        time.sleep(seconds)

    def _draw(self) -> None:
        if self._live is not None:
            self._live.update(
                self.screen.render(self.terminal.width, self.terminal.height), refresh=True
            )

    def _lines(self, fresh: list[EventView], now: float) -> None:
        names = {j.id: j.name for j in self.screen.jobs}
        for e in fresh:
            self.terminal.print(tables.EventLine(e, names).line, soft_wrap=True)
        if now >= self._line_due:
            self._line_due = now + LINE_INTERVAL_S
            for j in self.screen.jobs:
                where = (
                    f"{len(j.nodes)} nodes, {rate(j.rate)}" if j.nodes else j.reason or "no node"
                )
                line = (
                    f"{time.strftime('%H:%M:%S')}  {j.name}: {j.state}, {where}, "
                    f"{count(j.samples)} samples, {j.rescales} rescales"
                )
                self.terminal.print(Text(line, "dim"), soft_wrap=True)
