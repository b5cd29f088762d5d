"""Creates the first HiGHS solver of a process without its licence lines on standard output.

Since 1.16 the first solver of a process prints its version and licence before any option can be
set. The lines would precede the JSON output of a command. Everything else that is printed
meanwhile is passed on.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import TypeVar

BANNER = (b"Running HiGHS", b"Includes third-party software components")
"""How the lines of the banner begin."""
ResultT = TypeVar("ResultT")
_lock = threading.Lock()


def without_banner(create: Callable[[], ResultT]) -> ResultT:
    """Call ``create`` while standard output is captured, and return its result.

    Lines of the banner are dropped. Other threads' lines appear once ``create`` has returned.
    """
    flush = ctypes.CDLL(None).fflush
    with _lock:
        flush(None)
        try:
            stdout, capture = os.dup(1), os.memfd_create("highs-banner")
        except OSError:  # without a standard output there is nothing to capture
            return create()
        try:
            os.dup2(capture, 1)
            try:
                return create()
            finally:
                flush(None)
                os.dup2(stdout, 1)
                os.lseek(capture, 0, os.SEEK_SET)
                with os.fdopen(os.dup(capture), "rb") as output:
                    lines = [line for line in output if not line.startswith(BANNER)]
                if other := b"".join(lines):
                    os.write(1, other)
        finally:
            os.close(stdout)
            os.close(capture)
