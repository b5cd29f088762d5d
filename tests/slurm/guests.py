"""Other users of this machine for tests: what they need to run this project's Python, without a
change to anything outside.

Python, its packages and this checkout may lie in directories that only their owner may enter (such
as /root). A mount namespace of the test's own shows the same files in directories that all may
enter.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.waiting import PATIENCE_S

CHECKOUT = Path(__file__).parents[2]


def missing() -> str:
    """Why there can be no other users here; empty when there can."""
    if os.geteuid() != 0:
        return "only root can run processes of several users"
    absent = [name for name in ("unshare", "nsenter", "runuser") if shutil.which(name) is None]
    return f"{', '.join(absent)} not installed" if absent else ""


def users(count: int) -> list[str]:
    """Names of that many users of this machine besides root."""
    entries = sorted(
        (entry.pw_uid, entry.pw_name) for entry in pwd.getpwall() if 0 < entry.pw_uid < 65000
    )
    return [name for _, name in entries[:count]]


@contextlib.contextmanager
def view() -> Iterator[list[str]]:
    """The command to put before others so that what they start can be read by other users."""
    script = "\n".join([opened(), "echo $stage", "read end"])
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    holder = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stderr is not None
    stage = holder.stdout.readline().strip()
    try:
        assert stage, holder.stderr.read()
        yield ["nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", "--"]
    finally:
        holder.stdin.close()
        holder.wait(PATIENCE_S)
        with contextlib.suppress(OSError):
            Path(stage).rmdir()


def opened() -> str:
    """The shell script that makes Python and this checkout readable to all, in a mount namespace of
    its caller's.
    """
    stage = "stage=$(mktemp -d /tmp/mt-view-XXXXXX)"
    return "\n".join(["set -e", stage, "mount -t tmpfs tmpfs $stage", *_mounts()])


def _mounts() -> list[str]:
    needed = {Path(p).resolve() for p in (sys.base_prefix, sys.prefix, CHECKOUT)}
    closed: dict[Path, list[Path]] = {}
    for path in sorted(needed):
        barred = [p for p in reversed([path, *path.parents]) if not p.stat().st_mode & 0o001]
        if barred:
            closed.setdefault(barred[0], []).append(path)
    lines = []
    for number, (folder, paths) in enumerate(closed.items()):
        here = shlex.quote(str(folder))
        lines += [
            f"mkdir $stage/{number}",
            f"mount --bind {here} $stage/{number}",
            f"mount -t tmpfs -o mode=755 tmpfs {here}",
        ]
        for path in paths:
            inner = shlex.quote(str(path.relative_to(folder)))
            lines += [
                f"mkdir -p {here}/{inner}",
                f"mount --bind $stage/{number}/{inner} {here}/{inner}",
            ]
    return lines
