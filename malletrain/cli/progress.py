"""Shows the progress of a long computation and its remaining time, on stderr.

Decides the form: a bar on a terminal, otherwise a line at the start and then every half minute.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from malletrain.cli.common import say

EVERY_S = 30.0
"""Time between two lines without a terminal, seconds."""


class ProgressLine:
    """Use it as a context; call :meth:`update` as often as you like."""

    def __init__(self) -> None:
        from rich import progress as bars
        from rich.console import Console

        terminal = Console(stderr=True)
        self._bar = bars.Progress(
            bars.TextColumn("Simulating: {task.description}"),
            bars.BarColumn(),
            bars.TaskProgressColumn(),
            bars.TimeRemainingColumn(),
            console=terminal,
            transient=True,
            disable=not terminal.is_terminal,
        )
        self._tasks: dict[str, bars.TaskID] = {}
        self._lines = not terminal.is_terminal
        self._started_at = self._printed_at = time.monotonic()

    def __enter__(self) -> ProgressLine:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
        sys.stderr.flush()

    def update(self, what: str, part: float) -> None:
        """Report that the fraction ``part`` (0 to 1) of the task ``what`` is done."""
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=1.0)
            self._started_at = self._printed_at = time.monotonic()
            if self._lines:
                say(f"Simulating: {what} …")
        self._bar.update(self._tasks[what], completed=part)
        now = time.monotonic()
        if self._lines and now - self._printed_at >= EVERY_S and 0 < part < 1:
            self._printed_at = now
            remaining_s = (now - self._started_at) * (1 - part) / part
            say(f"Simulating: {what}, {100 * part:.0f} % done, about {_time(remaining_s)} to go")


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
