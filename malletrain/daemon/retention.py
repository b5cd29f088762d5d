"""Deletes leases and ended jobs that are older than the site's retention time. Decides when to
look.
"""

from __future__ import annotations

from malletrain.store.store import Store

EVERY_S = 3600.0
AGAIN_S = 5.0
"""How soon after a look that found as many as may go at once."""


class Retention:
    """Of one store. ``keep_s``: how long after their end, seconds; 0: for ever."""

    def __init__(self, store: Store, keep_s: float) -> None:
        self._store = store
        self.keep_s = keep_s
        self._due = 0.0

    def look(self, now: float) -> int:
        """Delete what is too old, if it is time to look; how much."""
        if not self.keep_s or self._due - EVERY_S <= now < self._due:  # else the clock was set back
            return 0
        gone = self._store.forget(now - self.keep_s)
        self._due = now + (AGAIN_S if gone else EVERY_S)
        return gone
