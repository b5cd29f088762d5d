"""The daemon as a process of its host: memory, open files, and what systemd is told.

Decides when freed memory is returned to the operating system, and which long-lived objects are kept
out of garbage collection. Messages of all sizes leave holes between objects that stay, and glibc
keeps the holes: after 48,000 mutated messages a daemon held 270 MB, of which it used 100.

Raises the limit of open files as well. The default of shells and systemd is 1,024, and each agent
and each client needs one; at the limit further agents are refused without a message. A process may
raise its own limit up to the hard limit (setrlimit(2)).

Reports the state of the daemon to systemd (sd_notify(3)), and decides how long systemd is to wait
for a start. :mod:`malletrain.daemon.main` decides when the daemon is up.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MIN_DESCRIPTORS = 65_536
"""Number of descriptors; more than the nodes of any machine."""


def allow_many(number: int = MIN_DESCRIPTORS) -> int:
    """Raise the soft limit of this process to ``number``, or to the hard limit if that is lower.
    Never lowers it. Return the new soft limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    new_limit = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < new_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
        return new_limit
    return soft


TRIM_INTERVAL_S = 60.0
"""Interval between two trims without growth, seconds."""
MIN_TRIM_INTERVAL_S = 1.0
"""Minimum time between two trims, seconds. A trim of 600 MB takes 25 ms."""
GROWTH_BYTES = 16 * 1024 * 1024
"""Growth since one of the last trims from which the process is trimmed before the interval is over.
A trim that frees less than WORTHWHILE_BYTES doubles the wait for the next one.
"""
HISTORY = 10
"""Number of trims whose result is kept. Memory held for longer is in use."""
SWOLLEN_BYTES = 4 * GROWTH_BYTES
"""Growth since the last trims from which the process counts as swollen."""
WORTHWHILE_BYTES = GROWTH_BYTES // 2
"""Minimum number of freed bytes of a worthwhile trim."""
MMAP_BYTES = 64 * 1024
"""Allocations of this size get pages of their own, which are returned when they are freed
(mallopt(3), M_MMAP_THRESHOLD). By default glibc raises the threshold up to 32 MB, and holes of
megabytes stay between small objects.
"""
_MMAP_THRESHOLD = -3
COLLECT_INTERVAL_S = 600.0
"""Interval of full garbage collections, seconds."""
_NEVER = 2**30
"""Threshold of Python's full collections that is never reached."""

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return the resident memory of this process, bytes (proc(5)); 0 if it is unknown."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@contextmanager
def full_collections_rare() -> Iterator[None]:
    """Run full garbage collections only every COLLECT_INTERVAL_S, in :meth:`MemoryTrim.update`.
    With 10,000 agents a full collection blocks the event loop for 200 ms, and by default runs every
    other second. Young generations are collected as usual.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def freeze_objects() -> None:
    """Exclude all current objects (modules, restored state) from garbage collection. A further call
    collects those that have become garbage, and freezes the rest again.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@contextmanager
def collection_disabled() -> Iterator[None]:
    """Disable garbage collection, for code that creates many objects and no cycles. Decoding a
    message of half a million lists then takes 19 ms instead of 125 ms.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class MemoryTrim:
    """Trims the memory of this process. ``resident``: returns its resident memory, bytes."""

    def __init__(self, resident: Callable[[], int] = resident_bytes) -> None:
        self._resident = resident
        self._last_trim_at = float("-inf")
        self._last_collection_at = float("inf")
        self._after_trims: deque[int] = deque(maxlen=HISTORY)
        """Resident bytes after each of the last trims, less those accounted for."""
        self._wait_s = MIN_TRIM_INTERVAL_S
        # malloc_trim(3) exists in glibc only
        library = ctypes.CDLL(None)
        self._trim = getattr(library, "malloc_trim", None)
        if self._trim is not None:
            library.mallopt(_MMAP_THRESHOLD, MMAP_BYTES)

    def swollen(self, accounted: int = 0) -> bool:
        """Whether the process holds far more memory than after the last trims. ``accounted``: bytes
        that are known to be in use, as for :meth:`update`.
        """
        if not self._after_trims:
            return False
        return self._resident() - accounted - min(self._after_trims) > SWOLLEN_BYTES

    def update(self, now: float, accounted: int = 0) -> bool:
        """Collect garbage and trim the heap if either is due. Call it regularly.

        Args:
            now: time, seconds.
            accounted: bytes that are known to be in use, such as those of connections.

        Returns:
            Whether the heap was trimmed.
        """
        self._last_collection_at = min(self._last_collection_at, now)
        if now - self._last_collection_at >= COLLECT_INTERVAL_S:
            self._last_collection_at = now
            gc.collect()
        elapsed_s = now - self._last_trim_at
        if elapsed_s < self._wait_s:
            return False
        before = self._resident()
        growth = before - accounted - min(self._after_trims, default=0)
        if elapsed_s < TRIM_INTERVAL_S and growth < GROWTH_BYTES:
            return False
        self._last_trim_at = now
        if self._trim is not None:
            self._trim(0)
        after = self._resident()
        self._after_trims.append(after - accounted)
        worthwhile = before - after >= WORTHWHILE_BYTES
        self._wait_s = (
            MIN_TRIM_INTERVAL_S if worthwhile else min(2.0 * self._wait_s, TRIM_INTERVAL_S)
        )
        return True


EXTEND_EVERY_S = 20.0
"""Interval at which a start that opens a large database asks systemd for more time, seconds."""
EXTEND_S = 120.0
"""Time from each such request within which the start has to end or ask again, seconds."""


def tell_service_manager(state: str) -> None:
    """Report the state of the service to systemd if it asks for that (sd_notify(3)). Failures are
    ignored.
    """
    if address := os.environ.get("NOTIFY_SOCKET"):
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel,
        ):
            channel.sendto(
                state.encode(), f"\0{address[1:]}" if address.startswith("@") else address
            )


@contextlib.contextmanager
def extended_start() -> Iterator[None]:
    """Ask systemd at intervals to wait longer for the start, because the copy and the migration of
    a large database take longer than TimeoutStartSec. A start that is killed begins again with
    both. When the start goes on, the status that systemd shows is empty again.
    """
    done, has_asked = threading.Event(), threading.Event()

    def ask() -> None:
        while not done.wait(EXTEND_EVERY_S):
            has_asked.set()
            tell_service_manager(
                f"EXTEND_TIMEOUT_USEC={round(EXTEND_S * 1e6)}\nSTATUS=Opens the database, which "
                "takes long while it is copied and migrated."
            )

    thread = threading.Thread(target=ask, name="extended start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if has_asked.is_set():
            tell_service_manager("STATUS=")
