"""Memory that is of no use any more goes back to the machine. Decides when.

Messages of all sizes leave holes between what stays, and glibc keeps them: a daemon that had heard
48,000 mutated messages held 270 MB, of which it used 100 (docs/measured.md).
"""

from __future__ import annotations

import ctypes

EVERY_S = 60.0


class Heap:
    """Of this process."""

    def __init__(self) -> None:
        self._due = 0.0
        # malloc_trim(3); other C libraries have none
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def look(self, now: float) -> bool:
        """Give back what is free, if it is time to; whether it was."""
        if self._trim is None or now < self._due:
            return False
        self._due = now + EVERY_S
        self._trim(0)
        return True
