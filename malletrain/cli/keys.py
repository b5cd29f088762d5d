"""Reads keys pressed on a terminal, one at a time and without echo, together with other input.

Decides how a key is read. The caller decides what it means.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from types import TracebackType

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._fd is not None and self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSAFLUSH, self._before)  # type: ignore[arg-type]

    def wait(self, seconds: float, news: int) -> list[str]:
        """Wait until a key is pressed, the file descriptor ``news`` is readable (it is not read),
        or ``seconds`` are over. Returns the pressed keys.
        """
        sources = [news] if self._fd is None else [news, self._fd]
        ready, _, _ = select.select(sources, [], [], seconds)
        if self._fd is None or self._fd not in ready:
            return []
        typed = os.read(self._fd, 1024)
        return split(typed.decode("utf-8", "replace")) if typed else [END]


def split(text: str) -> list[str]:
    """Returns the keys in a terminal's input: characters, and the names of other keys."""
    keys = []
    while text:
        word = next((s for s in SEQUENCES if text.startswith(s)), text[0])
        keys.append(SEQUENCES.get(word, word))
        text = text[len(word) :]
    return keys
