"""The one place that knows the time."""

from __future__ import annotations

import time


class Clock:
    """Seconds since the epoch that never jump: wall time at the start of the process plus monotonic
    time since.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Seconds since the epoch (UTC); never less than before."""
        return time.monotonic() + self._offset
