"""The signals of the embedded cluster's process: requests to stop, and ended children.

Decides nothing. The cluster's loop waits on the descriptor.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def install(request_stop: Callable[[], None]) -> int:
    """Call ``request_stop`` at each request to stop. Wakes the loop at such a request and when a
    child ends. Returns the descriptor to wait on.
    """
    reader, writer = os.pipe()
    for fd in (reader, writer):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def stop(number: int, frame: object) -> None:
        request_stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return reader


def drain(fd: int) -> None:
    """Empty ``fd`` before the next wait."""
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass
