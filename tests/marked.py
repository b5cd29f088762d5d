"""Finds the processes that a test has started by a variable in their environment, wherever they are
now, and ends them with the test.
"""

from __future__ import annotations

import contextlib

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
