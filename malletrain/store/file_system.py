"""The type of the file system in which a file lies, from the kernel's list of mounts. Pure.

SQLite's write-ahead log needs memory that all processes with the database share, which the hosts of
a network file system do not have (sqlite.org, "Write-Ahead Logging", section 8). There only the
processes of one host may open the database.
"""

from __future__ import annotations

import re
from pathlib import Path

MOUNTS = Path("/proc/self/mounts")
NETWORK = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "gpfs", "lustre", "nfs", "nfs4"),
        *("ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "wekafs"),
        *("fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.sshfs"),
    }
)
"""Types of file systems that several hosts can mount."""
_OCTAL = re.compile(r"\\([0-7]{3})")


def type_of(path: Path, mounts: str) -> str:
    """Return the type of the file system of a path; empty if it is not known.

    Args:
        path: an absolute path without symbolic links. It need not exist.
        mounts: content of ``/proc/self/mounts`` (proc(5)).
    """
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[1]))
        # A later mount on the same directory hides the earlier one.
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind
