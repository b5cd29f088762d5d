"""The ranks that have run the code after an epoch's steps, counted in the group's store.

A rank that is stopped for a planned change in that code would not run it to its end, because the
snapshot of rank 0 is from after it. :class:`EpochEnds` decides how long rank 0, which has saved,
waits for slower ranks before it lets the launcher stop all.
"""

from __future__ import annotations

import time

from malletrain.training import report
from malletrain.training.disk_tier import group_store
from malletrain.training.ranks import rank_and_world

WAIT_S = 1.0
"""Maximum time that rank 0 waits, seconds. The state is saved then, but of a notice of 5 s a drain
may take 3 s.
"""
_LOOK_S = 0.01


class EpochEnds:
    """The ends of the epochs of one run, on one rank.

    Args:
        number: number of the run in the script, the same on all ranks.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._ends = 0
        self._just_closed = False
        self._is_lost = False
        """The store does not answer. Each further question would be a warning of torch's."""

    def closed(self) -> None:
        """Note that this rank has run the code after an epoch. Takes one message."""
        self._ends += 1
        self._just_closed = self._add(1) is not None

    def over(self) -> None:
        """Note that this rank goes on with the next epoch."""
        self._just_closed = False

    def wait_for_all(self) -> None:
        """Wait until all ranks have run the code after the epoch that this rank has just closed,
        for at most :data:`WAIT_S`. Does nothing within an epoch.
        """
        deadline = time.monotonic() + WAIT_S
        while self._just_closed and time.monotonic() < deadline:
            if (self._add(0) or rank_and_world()[1]) >= rank_and_world()[1]:
                return
            time.sleep(_LOOK_S)

    def _add(self, count: int) -> int | None:
        """Add ``count`` to the number of ranks that have closed this epoch. Return that number;
        None with one rank or without a store.
        """
        store = group_store() if rank_and_world()[1] > 1 and not self._is_lost else None
        if store is None:
            return None
        key = f"malletrain/epoch end/{report.generation()}/{self._number}/{self._ends}"
        try:
            return int(store.add(key, count))
        except Exception:  # the node of the store is lost: the next collective says so
            self._is_lost = True
            return None
