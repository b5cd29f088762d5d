"""Process 1 of a host of the test bed: gives it a file system of its own, then reaps orphans for
ever. ``init.py FOLDER NAME``: the host's private directories lie below FOLDER.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

PRIVATE = {"etc": "/etc", "tmp": "/tmp", "spool": "/var/spool", "log": "/var/log"}
"""Folder → what the host sees in its place."""
EMPTY = ("/run", "/dev/shm")
PATIENCE_S = 5.0


def main() -> int:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    mount = ["mount", "--make-rprivate", "/"]
    subprocess.run(mount, check=True)
    for private, public in PRIVATE.items():
        subprocess.run(["mount", "--bind", str(folder / private), public], check=True)
    for public in EMPTY:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", public], check=True)
    subprocess.run(["sh", str(folder / "view.sh")], check=True)
    subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
    subprocess.run(["hostname", name], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    (folder / "up").touch()
    while True:
        signal.sigtimedwait({signal.SIGCHLD}, PATIENCE_S)
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break


if __name__ == "__main__":
    sys.exit(main())
