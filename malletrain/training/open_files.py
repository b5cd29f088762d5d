"""Files that the script keeps open: what it has written to them is stored with each snapshot.

A process that is stopped for a change of nodes ends by a signal, and Python's buffers end with it.
A row that lies in one would be missing: the process that goes on from the snapshot does not write
it again. Decides which files are meant: regular ones that Python's own objects write to. Standard
library only.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import stat
from pathlib import Path

_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_OUTPUTS = 2
"""The highest descriptor of standard output and standard error, which MalleTrain flushes."""


def flush() -> None:
    """Have all open files store what this process has written to them. A file that cannot, as on a
    full disk, stops no training: the script meets that itself. Takes some 40 ms where a file is
    open, and none elsewhere.
    """
    files = _written_files()
    if not files:
        return
    for one in gc.get_objects():
        if not issubclass(type(one), _WRITERS):  # isinstance() asks proxies of other packages
            continue
        with contextlib.suppress(Exception):
            if not one.closed and one.fileno() in files:
                one.flush()


def _written_files() -> set[int]:
    """Descriptors of regular files that are open for writing."""
    files = set()
    for entry in os.listdir("/proc/self/fd"):
        number = int(entry)
        with contextlib.suppress(OSError, ValueError, StopIteration):
            if number > _OUTPUTS and stat.S_ISREG(os.fstat(number).st_mode) and _writes(number):
                files.add(number)
    return files


def _writes(number: int) -> bool:
    """Whether the descriptor is open for writing."""
    lines = Path(f"/proc/self/fdinfo/{number}").read_text().splitlines()
    flags = next(line.split()[1] for line in lines if line.startswith("flags:"))
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY
