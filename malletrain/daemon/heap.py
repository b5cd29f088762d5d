"""Memory that is of no use any more goes back to the machine. Decides when.

Messages of all sizes leave holes between what stays, and glibc keeps them: a daemon that had heard
48,000 mutated messages held 270 MB, of which it used 100 (docs/measured.md).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

EVERY_S = 60.0
AT_LEAST_S = 1.0
"""Between two times; of 600 MB it takes 25 ms."""
GROWN_BYTES = 16 * 1024 * 1024
"""Who has grown by so much since the last time does not wait for the next."""

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """What this process holds of the machine's memory (proc(5)); 0 where nobody tells."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class Heap:
    """Of this process. ``held``: the bytes that it holds."""

    def __init__(self, held: Callable[[], int] = resident_bytes) -> None:
        self._held = held
        self._last = float("-inf")
        self._left = 0
        """What was held after the last time."""
        # malloc_trim(3); other C libraries have none
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def look(self, now: float) -> bool:
        """Give back what is free, if it is time to; whether it was."""
        since = now - self._last
        if self._trim is None or since < AT_LEAST_S:
            return False
        if since < EVERY_S and self._held() - self._left < GROWN_BYTES:
            return False
        self._last = now
        self._trim(0)
        self._left = self._held()
        return True
