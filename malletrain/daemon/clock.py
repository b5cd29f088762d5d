"""The one place that reads the time."""

from __future__ import annotations

import time
from collections import deque

LEAST_S = 60.0
"""By how much the host's clock is set where that is followed; less is corrected by and by, or does
not matter.
"""
MOST_SETS, WITHIN_S = 5, 3600.0
"""Who keeps setting the host's clock is followed so often within so long."""


class Clock:
    """Seconds since the epoch that never jump: wall time at the start of the process, or when
    :meth:`set` was called last, plus monotonic time since.
    """

    def __init__(self) -> None:
        self._offset = self._asleep = 0.0
        self._sets: deque[float] = deque(maxlen=MOST_SETS)
        self.set()
        self._sets.clear()

    def now(self) -> float:
        """Seconds since the epoch (UTC); until it is set never less than before."""
        return time.monotonic() + self._offset

    def behind_s(self) -> float:
        """By how much the host's clock is ahead of this one, seconds; negative: it is behind."""
        return time.time() - self.now()

    def slept_s(self) -> float:
        """For how long the host was suspended since it was set: that went by, though nothing here
        noticed.
        """
        return _asleep_s() - self._asleep

    def set(self) -> None:
        """Show what the host's clock shows."""
        if abs(self.behind_s() - self.slept_s()) >= LEAST_S:  # else the host was suspended
            self._sets.append(time.monotonic())
        self._offset = time.time() - time.monotonic()
        self._asleep = _asleep_s()

    def sets(self) -> int:
        """How often the host's clock was set of late, so that this one followed."""
        return sum(at > time.monotonic() - WITHIN_S for at in self._sets)


def _asleep_s() -> float:
    """Since the host's start (clock_gettime(2)); 0 where nobody tells."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return 0.0 if boot is None else time.clock_gettime(boot) - time.monotonic()
