"""Submitting leases at the site's pace, and the two ways a submission may fail that need care. For every batch scheduler."""

from __future__ import annotations

import threading
import time

from scavenger.commands import Commands
from scavenger.interface import SchedulerError


class UnsureError(SchedulerError):
    """The submission failed, and its job may be there or not."""


class LimitReachedError(SchedulerError):
    """The main scheduler takes no more jobs of this user for now."""


class Pace:
    """Keeps to ``rate`` submissions per second over all threads."""

    def __init__(self, rate: float, commands: Commands) -> None:
        self.rate = rate
        self.commands = commands
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Wait for one's turn."""
        with self._lock:
            at = max(self._next, time.monotonic())
            self._next = at + 1.0 / self.rate
        self.commands.sleep(max(0.0, at - time.monotonic()))
