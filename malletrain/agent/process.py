"""The processes of a job on this node: started under a supervisor, stopped, and cleaned up.

There are two safeguards. The supervisor (see supervisor.py) kills the remaining processes of its
job when the launcher or the agent ends in any way. The agent is a subreaper as well, and kills its
own descendants, for the case that the supervisor itself was killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Container, Mapping

from malletrain.launch.supervisor import (
    PR_SET_CHILD_SUBREAPER,
    kill_descendants,
    prctl,
)


def become_subreaper() -> None:
    """Make orphans among the descendants of this process its children (PR_SET_CHILD_SUBREAPER,
    Linux 3.4). Raises OSError.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)


class JobProcess:
    """A launcher and its descendants. Create it in the main thread only.

    Raises OSError if the supervisor cannot be started. A command that cannot be run gives exit code
    126 or 127.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            close_fds=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Pid of the supervisor."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code of the launcher; None while it runs."""
        return self._process.poll()

    def forget(self) -> None:
        """Reap the supervisor after all processes were killed."""
        self._process.poll()

    def kill(self) -> None:
        """Kill the supervisor, with which all its descendants end."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM to the launcher, which stops its workers and ends."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)


def sweep(limit_s: float = 10.0) -> list[int]:
    """Kill every descendant of this process. Return those that cannot be killed. ``limit_s``: time
    limit, seconds.
    """
    remaining = kill_descendants(limit_s)
    reap_orphans()
    return remaining


def reap_orphans(keep: Container[int] = ()) -> None:
    """Reap adopted orphans, so that they do not stay as zombies. ``keep``: children that are reaped
    elsewhere.
    """
    while True:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if info is None or info.si_pid in keep:
            return
        try:
            os.waitpid(info.si_pid, os.WNOHANG)
        except ChildProcessError:
            return
