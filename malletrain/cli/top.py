"""``malletrain top``: the live screen."""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from malletrain.cli.common import Refused, asking, state_dir_option
from malletrain.cli.keys import DOWN, END, HOME, PAGE_DOWN, PAGE_UP, UP, Keys

if TYPE_CHECKING:
    from rich.console import Console

    from malletrain.render.follow import Follower, Look

STEPS = {UP: -1, "k": -1, DOWN: 1, "j": 1, PAGE_UP: -10, PAGE_DOWN: 10, HOME: -(10**6)}
"""Key → number of jobs by which the screen scrolls."""
END_TIMEOUT_S = 0.5
"""Maximum time that the end waits for a request in progress, seconds."""


@click.command()
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1, max=60),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two updates.",
)
@click.option(
    "--all", "all_nodes", is_flag=True, help="Also show the nodes that the main scheduler uses."
)
@click.option("--once", is_flag=True, help="Print the screen once and end; also works in a pipe.")
@state_dir_option
def top(interval: float, all_nodes: bool, once: bool, state_dir: Path | None) -> None:
    """Watch nodes, throughput and events live. q or Ctrl-C ends it.

    Running jobs come first. The arrow keys (or j and k) scroll through the jobs, a shows or hides
    the nodes that the main scheduler uses, the space bar updates at once. It continues after a
    restart of the daemon, and shows a message while the daemon is not reachable.

    \b
    Example:
      malletrain top
    """
    from malletrain.render.console import console
    from malletrain.render.follow import Follower
    from malletrain.render.live import Screen

    terminal = console()
    if not terminal.is_terminal and not once:
        raise Refused(
            "The live screen needs a terminal; use 'malletrain top --once' or 'malletrain "
            "status' in a pipe."
        )
    screen = Screen()
    with asking(state_dir) as client:
        follower = Follower(screen, client, all_nodes=all_nodes)
        follower.look()
    if once:
        terminal.print(screen.render(terminal.width, terminal.height), height=terminal.height)
        return
    watcher = Watcher(follower, state_dir, interval)
    watcher.start()
    try:
        _watch(terminal, follower, watcher)
    finally:
        watcher.end()


def _watch(terminal: Console, follower: Follower, watcher: Watcher) -> None:
    """Draw the screen until the user quits."""
    from rich.live import Live

    above, screen = 0, follower.screen
    with Keys() as keys, Live(console=terminal, screen=True, auto_refresh=False) as live:
        while True:
            picture = screen.render(terminal.width, terminal.height, above=above, keys=True)
            live.update(picture, refresh=True)
            for key in keys.wait(1.0, watcher.bell):
                if key in ("q", "Q", END):
                    return
                if key == "a":
                    follower.all_nodes = not follower.all_nodes
                if key in ("a", " "):
                    watcher.now()
                above = min(max(0, above + STEPS.get(key, 0)), max(0, len(screen.jobs) - 1))
            for seen in watcher.seen():
                if isinstance(seen, str):
                    screen.unreachable(seen)
                else:
                    follower.show(seen)


class Watcher(threading.Thread):
    """Requests updates in the background, so that keys work while the daemon is slow or not
    reachable.

    Args:
        follower: sends the requests; its screen is not changed here.
        state_dir: state directory of the daemon.
        interval: time between two updates, seconds.
    """

    def __init__(self, follower: Follower, state_dir: Path | None, interval: float) -> None:
        super().__init__(name="looks", daemon=True)
        self._follower, self._state_dir, self._interval = follower, state_dir, interval
        self._looks: queue.SimpleQueue[Look | str] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._over = False
        self.bell, self._ring = os.pipe()
        """Readable when :meth:`seen` has something to return."""

    def run(self) -> None:
        """Request updates until :meth:`end` is called."""
        from malletrain.client import ClientError

        while not self._over:
            try:
                with asking(self._state_dir) as client:
                    self._follower.client = client
                    while not self._over:
                        self._put(self._follower.ask())
                        self._pause()
            except (ClientError, click.ClickException) as error:
                self._put(str(error))
                self._pause()

    def now(self) -> None:
        """Request an update at once."""
        self._hurry.set()

    def seen(self) -> list[Look | str]:
        """Returns the new updates, and error messages of failed requests."""
        if self._looks.empty():
            return []
        os.read(self.bell, 4096)
        made = []
        while not self._looks.empty():
            made.append(self._looks.get())
        return made

    def end(self) -> None:
        """Stop the updates."""
        self._over = True
        self._hurry.set()
        self.join(END_TIMEOUT_S)

    def _put(self, seen: Look | str) -> None:
        self._looks.put(seen)
        os.write(self._ring, b".")

    def _pause(self) -> None:
        self._hurry.wait(self._interval)
        self._hurry.clear()
