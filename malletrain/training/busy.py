"""How long this process has worked itself, instead of waiting for its peers.

Ranks that train together make their steps at one pace, that of the slowest. What tells the slow one
from those that wait for it is the time in which it had something to do. Decides how that is
measured where the script does not say it: the time for which the reporting thread was on a
processor or wanted one, as the kernel counts it. A thread that waits in a collective sleeps, and
one beside a noisy neighbour queues for its processor. With an accelerator the thread's time says
nothing, and nothing is told. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading

_ELSEWHERE = ("jax", "tensorflow", "torch_xla")
"""Libraries whose work is done elsewhere than in the thread that reports."""


class Busy:
    """That of one process, as its script says or as the thread that reports has worked."""

    def __init__(self) -> None:
        self._script_s: float | None = None
        self._clock: BusyClock | None = None

    def step(self, seconds: float | None) -> None:
        """A step is done, in the thread that reports. ``seconds``: what the script says of it."""
        if seconds is not None:
            self._script_s = (self._script_s or 0.0) + seconds
        elif self._clock is None:
            self._clock = BusyClock()

    def read(self) -> float | None:
        """Seconds so far; None where nothing is known."""
        return self._clock.read() if self._script_s is None and self._clock else self._script_s

    def close(self) -> None:
        """Nothing is told any more."""
        if self._clock is not None:
            self._clock.close()


class BusyClock:
    """Of the thread that makes it; it may be read in any."""

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):  # no such file in some containers: then nothing is told
            path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> float | None:
        """Seconds since the thread began; None where they say nothing."""
        if self._file is None:
            return None
        if _elsewhere():
            self.close()
            return None
        try:
            ran, waited = os.pread(self._file, 80, 0).split()[:2]
            return (int(ran) + int(waited)) / 1e9
        except (OSError, ValueError):  # the thread has ended
            self.close()
            return None

    def close(self) -> None:
        """Nothing is told any more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _elsewhere() -> bool:
    """Whether the work is done by an accelerator."""
    if any(name in sys.modules for name in _ELSEWHERE):
        return True
    torch = sys.modules.get("torch")
    kinds = (getattr(torch, name, None) for name in ("cuda", "xpu"))
    return any(kind is not None and kind.is_initialized() for kind in kinds)
