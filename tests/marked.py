"""Finds the processes that a test has started by a variable in their environment, wherever they are
now, and ends them with the test, also if that is killed.

    python -m tests.marked TOKEN      ends those of a session after a line, or the end, of its input
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

MARK = "MALLETRAIN_TEST_SESSION"
"""The variable; its value is the id of the session."""


def running(token: str) -> list[psutil.Process]:
    """Return the running processes of a session."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == token and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def end(token: str) -> None:
    """End all processes of a session."""
    for process in running(token):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            process.terminate()
    _, alive = psutil.wait_procs(running(token), timeout=20)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@contextlib.contextmanager
def session(token: str) -> Iterator[None]:
    """End all processes of a session at its end, or when this process has ended."""
    guard = subprocess.Popen(
        [sys.executable, "-m", "tests.marked", token],
        stdin=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.communicate(b"\n")


if __name__ == "__main__":
    sys.stdin.readline()
    end(sys.argv[1])
