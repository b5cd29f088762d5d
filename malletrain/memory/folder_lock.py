"""Whether the process that made a folder still lives, where its number says nothing.

Agents in containers of one node have the same ``/tmp`` or ``/dev/shm`` and do not see each other's
processes. So each keeps a lock on its folders (flock(2)): the kernel takes it away with the
process, however that ends. Where a file system has no such locks nothing is locked, and the process
number alone counts. Standard library only.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock_folder(folder: Path) -> None:
    """Lock ``folder`` until this process ends.

    Raises:
        OSError: it is not there.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # closed by nobody
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # no locks here
        os.close(fd)


def is_locked(folder: Path) -> bool:
    """Whether a living process has locked it, this one included."""
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
