"""``malletrain top``: the live screen.

:class:`Keys` reads keys pressed on a terminal, one at a time and without echo, together with other
input. It decides how a key is read; :func:`top` decides what it means.
"""

from __future__ import annotations

import os
import queue
import select
import sys
import termios
import threading
import tty
from pathlib import Path
from typing import TYPE_CHECKING

import click

from malletrain.cli.common import NOT_WATCHED, Refused, client_of, interruptible, state_dir_option

if TYPE_CHECKING:
    from rich.console import Console

    from malletrain.render.live import Follower, PollAnswers

UP, DOWN, PAGE_UP, PAGE_DOWN, HOME = "up", "down", "page up", "page down", "home"
END = "\x04"
"""Ctrl-D, and the end of standard input."""
SEQUENCES = {
    "\x1b[A": UP,
    "\x1bOA": UP,
    "\x1b[B": DOWN,
    "\x1bOB": DOWN,
    "\x1b[5~": PAGE_UP,
    "\x1b[6~": PAGE_DOWN,
    "\x1b[H": HOME,
    "\x1b[1~": HOME,
}
"""Escape sequence → key, for keys that are not characters (ECMA-48, DEC VT100)."""


class Keys:
    """Standard input, read key by key for as long as the context lasts.

    Ctrl-C stays an interrupt. If standard input is not a terminal, no keys are read.
    """

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[object] | None = None

    def __enter__(self) -> Keys:
        if self._fd is not None:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._fd is not None and self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSAFLUSH, self._before)  # type: ignore[arg-type]

    def wait(self, seconds: float, wake_fd: int) -> list[str]:
        """Wait until a key is pressed, the file descriptor ``wake_fd`` is readable (it is not
        read), or ``seconds`` are over. Return the pressed keys.
        """
        sources = [wake_fd] if self._fd is None else [wake_fd, self._fd]
        ready, _, _ = select.select(sources, [], [], seconds)
        if self._fd is None or self._fd not in ready:
            return []
        typed = os.read(self._fd, 1024)
        return split(typed.decode("utf-8", "replace")) if typed else [END]


def split(text: str) -> list[str]:
    """Return the keys in a terminal's input: characters, and the names of other keys."""
    keys = []
    while text:
        word = next((s for s in SEQUENCES if text.startswith(s)), text[0])
        keys.append(SEQUENCES.get(word, word))
        text = text[len(word) :]
    return keys


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
    from malletrain.render.columns import console, redraws
    from malletrain.render.live import Follower, Screen

    terminal = console()
    if not redraws(terminal) and not once:
        raise Refused(
            "The live screen needs a terminal that can be redrawn, unlike TERM=dumb; use "
            "'malletrain top --once' or 'malletrain status' there and in a pipe."
        )
    screen = Screen()
    with client_of(state_dir) as client:
        follower = Follower(screen, client, all_nodes=all_nodes)
        follower.update()
    if once:
        terminal.print(screen.render(terminal.width, terminal.height), height=terminal.height)
        return
    watcher = Watcher(follower, state_dir, interval)
    watcher.start()
    try:
        with interruptible(lambda: NOT_WATCHED):
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
            for key in keys.wait(1.0, watcher.wake_fd):
                if key in ("q", "Q", END):
                    return
                if key == "a":
                    follower.all_nodes = not follower.all_nodes
                if key in ("a", " "):
                    watcher.refresh()
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
        super().__init__(name="answers", daemon=True)
        self._follower, self._state_dir, self._interval = follower, state_dir, interval
        self._answers: queue.SimpleQueue[PollAnswers | str] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._over = False
        self.wake_fd, self._wake_write_fd = os.pipe()
        """Readable when :meth:`seen` has something to return."""

    def run(self) -> None:
        """Request updates until :meth:`end` is called."""
        from malletrain.client import ClientError

        while not self._over:
            try:
                with client_of(self._state_dir) as client:
                    self._follower.client = client
                    while not self._over:
                        self._put(self._follower.ask())
                        self._pause()
            except (ClientError, click.ClickException) as error:
                self._put(str(error))
                self._pause()

    def refresh(self) -> None:
        """Request an update at once."""
        self._hurry.set()

    def seen(self) -> list[PollAnswers | str]:
        """Return the new updates, and error messages of failed requests."""
        if self._answers.empty():
            return []
        os.read(self.wake_fd, 4096)
        answers = []
        while not self._answers.empty():
            answers.append(self._answers.get())
        return answers

    def end(self) -> None:
        """Stop the updates."""
        self._over = True
        self._hurry.set()
        self.join(END_TIMEOUT_S)

    def _put(self, seen: PollAnswers | str) -> None:
        self._answers.put(seen)
        os.write(self._wake_write_fd, b".")

    def _pause(self) -> None:
        self._hurry.wait(self._interval)
        self._hurry.clear()
