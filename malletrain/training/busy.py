"""Measures the time for which this process worked itself instead of waiting for other ranks.

Ranks that train together all step at the pace of the slowest. The slow rank differs from those that
wait for it by its working time. If the script does not report that time, it is the time for which
the reporting thread was on a processor or waited for one, as the kernel counts it: a thread that
waits in a collective sleeps, and a thread beside a noisy neighbour waits for its processor. With an
accelerator the thread's time is meaningless, and nothing is reported. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading

_ACCELERATOR_LIBRARIES = ("jax", "tensorflow", "torch_xla")
"""Libraries whose work is not done in the reporting thread."""


class Busy:
    """Working time of one process, as reported by its script or else measured on the reporting
    thread.
    """

    def __init__(self) -> None:
        self._script_s: float | None = None
        self._clock: BusyClock | None = None

    def step(self, seconds: float | None) -> None:
        """Count a step; call it in the reporting thread. ``seconds``: working time reported by the
        script, or None.
        """
        if seconds is not None:
            self._script_s = (self._script_s or 0.0) + seconds
        elif self._clock is None:
            self._clock = BusyClock()

    def read(self) -> float | None:
        """Return the working time so far, seconds; None if unknown."""
        return self._clock.read() if self._script_s is None and self._clock else self._script_s

    def close(self) -> None:
        """Stop measuring."""
        if self._clock is not None:
            self._clock.close()


class BusyClock:
    """Working time of the thread that creates it. Any thread can read it."""

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):  # absent in some containers: then nothing is reported
            path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> float | None:
        """Return the working time of the thread since its start, seconds; None if meaningless."""
        if self._file is None:
            return None
        if _uses_accelerator():
            self.close()
            return None
        try:
            ran, waited = os.pread(self._file, 80, 0).split()[:2]
            return (int(ran) + int(waited)) / 1e9
        except (OSError, ValueError):  # the thread has ended
            self.close()
            return None

    def close(self) -> None:
        """Stop measuring."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _uses_accelerator() -> bool:
    """Return whether an accelerator does the work."""
    if any(name in sys.modules for name in _ACCELERATOR_LIBRARIES):
        return True
    torch = sys.modules.get("torch")
    kinds = (getattr(torch, name, None) for name in ("cuda", "xpu"))
    return any(kind is not None and kind.is_initialized() for kind in kinds)
