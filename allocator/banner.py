"""HiGHS without the licence line that it prints.

Since 1.16 the first solver of a process says its version and licence on standard output before any
option can be set. There it would stand in front of the JSON of a command.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import TypeVar

BANNER = (b"Running HiGHS", b"Includes third-party software components")
"""What its lines begin with."""
MadeT = TypeVar("MadeT")
_turn = threading.Lock()


def without_banner(make: Callable[[], MadeT]) -> MadeT:
    """What ``make`` makes, the first solver of this process. What others print meanwhile comes a
    moment later.
    """
    flush = ctypes.CDLL(None).fflush
    with _turn:
        flush(None)
        try:
            before, kept = os.dup(1), os.memfd_create("said")
        except OSError:  # no standard output, no word on it
            return make()
        try:
            os.dup2(kept, 1)
            try:
                return make()
            finally:
                flush(None)
                os.dup2(before, 1)
                os.lseek(kept, 0, os.SEEK_SET)
                with os.fdopen(os.dup(kept), "rb") as said:
                    lines = [line for line in said if not line.startswith(BANNER)]
                if rest := b"".join(lines):
                    os.write(1, rest)
        finally:
            os.close(before)
            os.close(kept)
