"""Deletes leases and ended jobs that are older than the site's retention time. Decides when to
check.
"""

from __future__ import annotations

from malletrain.store.store import Store

INTERVAL_S = 3600.0
"""Interval between two checks, seconds."""
NEXT_BATCH_S = 5.0
"""Time to the next check if a check has deleted rows, seconds. One check deletes a limited
number.
"""


class Retention:
    """The retention of one store. ``keep_s``: time for which rows are kept after their end,
    seconds; 0 to keep them for ever.
    """

    def __init__(self, store: Store, keep_s: float) -> None:
        self._store = store
        self.keep_s = keep_s
        self._due = 0.0

    def look(self, now: float) -> int:
        """Delete old rows if a check is due. Returns their number."""
        # If the clock was set back, the next check is due at once.
        if not self.keep_s or self._due - INTERVAL_S <= now < self._due:
            return 0
        deleted = self._store.forget(now - self.keep_s)
        self._due = now + (NEXT_BATCH_S if deleted else INTERVAL_S)
        return deleted
