"""The daemon's clock, and waiting for an event for a limited time. No other module of the daemon
reads the time.
"""

from __future__ import annotations

import time
from collections import deque

MAX_WAIT_S = 10.0
"""Maximum time for which a request waits, seconds."""


MIN_CHANGE_S = 60.0
"""Minimum change of the host's clock that the daemon follows, seconds. Smaller changes do not
matter.
"""
MAX_CHANGES, CHANGES_PERIOD_S = 5, 3600.0
"""Maximum number of changes that the daemon follows within a period, and that period, seconds."""


class Clock:
    """Seconds since the epoch that never jump: wall time at the start of the process or at the last
    :meth:`set`, plus monotonic time since.
    """

    def __init__(self) -> None:
        self._offset = self._asleep = 0.0
        self._sets: deque[float] = deque(maxlen=MAX_CHANGES)
        self.set()
        self._sets.clear()

    def now(self) -> float:
        """Return the seconds since the epoch (UTC). They never decrease between two calls of
        :meth:`set`.
        """
        return time.monotonic() + self._offset

    def behind_s(self) -> float:
        """Return the seconds by which the host's clock is ahead of this one; negative if it is
        behind.
        """
        return time.time() - self.now()

    def slept_s(self) -> float:
        """Return the seconds for which the host was suspended since the last :meth:`set`. Monotonic
        time does not count them.
        """
        return _asleep_s() - self._asleep

    def set(self) -> None:
        """Set this clock to the time of the host's clock."""
        if abs(self.behind_s() - self.slept_s()) >= MIN_CHANGE_S:  # else the host was suspended
            self._sets.append(time.monotonic())
        self._offset = time.time() - time.monotonic()
        self._asleep = _asleep_s()

    def sets(self) -> int:
        """Return how often this clock followed the host's clock within ``CHANGES_PERIOD_S``."""
        return sum(at > time.monotonic() - CHANGES_PERIOD_S for at in self._sets)


def _asleep_s() -> float:
    """Return the seconds of suspension since the host's start (clock_gettime(2)); 0 if the system
    does not count them.
    """
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return 0.0 if boot is None else time.clock_gettime(boot) - time.monotonic()
