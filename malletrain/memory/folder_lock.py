"""Locks that show whether the process that created a folder still runs, if its process id cannot
show it.

Agents in containers of one node share ``/tmp`` or ``/dev/shm`` and do not see each other's
processes. So each holds a lock on its folders (flock(2)), which the kernel releases when the
process ends. If a file system has no such locks, nothing is locked, and only the process id is
used. Standard library only.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock_folder(folder: Path) -> None:
    """Lock ``folder`` until this process ends.

    Raises:
        OSError: the folder cannot be opened.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # never closed
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # no locks here
        os.close(fd)


def is_locked(folder: Path) -> bool:
    """Return whether a running process, such as this one, has locked ``folder``."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False
