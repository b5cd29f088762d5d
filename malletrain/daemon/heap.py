"""Memory that is of no use any more goes back to the machine, and what stays for good is not looked
through for such again and again. Decides when.

Messages of all sizes leave holes between what stays, and glibc keeps them: a daemon that had heard
48,000 mutated messages held 270 MB, of which it used 100.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

EVERY_S = 60.0
AT_LEAST_S = 1.0
"""Between two times; of 600 MB it takes 25 ms."""
GROWN_BYTES = 16 * 1024 * 1024
"""Who holds so much more than was left after one of the last times does not wait for the next, as
long as that is worth it: what brings back less than WORTH_BYTES doubles the wait.
"""
REMEMBERED = 10
"""Of these times: what is held for longer is in use."""
SWOLLEN_BYTES = 4 * GROWN_BYTES
WORTH_BYTES = GROWN_BYTES // 2
LARGE_BYTES = 64 * 1024
"""What is as large gets pages of its own, which go back to the machine at its end (mallopt(3)).
Left alone glibc raises this to 32 MB as it goes, and holes of megabytes stay between small things.
"""
_MMAP_THRESHOLD = -3
SEARCH_EVERY_S = 600.0
_NEVER = 2**30
"""Searches of what is new before one of all."""

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """What this process holds of the machine's memory (proc(5)); 0 where nobody tells."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@contextmanager
def rarely_searched() -> Iterator[None]:
    """Python searches all there is for cycles every SEARCH_EVERY_S only, in :meth:`Heap.look`; what
    is new it searches as always. With 10,000 agents a full search keeps the loop for 200 ms, and
    came every other second.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def settle() -> None:
    """What there is now stays (modules, and what was restored): Python's search for cycles leaves
    it out from now on. May be called again: what is garbage by then is found once.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@contextmanager
def unsearched() -> Iterator[None]:
    """No search for cycles meanwhile: for what makes many objects and no cycles. To read a message
    of half a million lists takes 19 ms then, and 125 otherwise.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Heap:
    """Of this process. ``held``: the bytes that it holds."""

    def __init__(self, held: Callable[[], int] = resident_bytes) -> None:
        self._held = held
        self._last = float("-inf")
        self._searched = float("inf")
        self._left: deque[int] = deque(maxlen=REMEMBERED)
        """What was held after each of the last times, beside what was known for."""
        self._wait_s = AT_LEAST_S
        # malloc_trim(3); other C libraries have none
        library = ctypes.CDLL(None)
        self._trim = getattr(library, "malloc_trim", None)
        if self._trim is not None:
            library.mallopt(_MMAP_THRESHOLD, LARGE_BYTES)

    def swollen(self, known: int = 0) -> bool:
        """Far more is held than was left of late. ``known``: bytes of it for which there is a
        reason, now as at each :meth:`look`.
        """
        return bool(self._left) and self._held() - known - min(self._left) > SWOLLEN_BYTES

    def look(self, now: float, known: int = 0) -> bool:
        """Search for garbage and give back what is free, if it is time to; whether it was given
        back.
        """
        self._searched = min(self._searched, now)
        if now - self._searched >= SEARCH_EVERY_S:
            self._searched = now
            gc.collect()
        since = now - self._last
        if since < self._wait_s:
            return False
        before = self._held()
        if since < EVERY_S and before - known - min(self._left, default=0) < GROWN_BYTES:
            return False
        self._last = now
        if self._trim is not None:
            self._trim(0)
        left = self._held()
        self._left.append(left - known)
        worth = before - left >= WORTH_BYTES
        self._wait_s = AT_LEAST_S if worth else min(2.0 * self._wait_s, EVERY_S)
        return True
