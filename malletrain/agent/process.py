"""The processes of a job on this node: started under a supervisor, stopped, and cleaned up.

There are two safeguards. The supervisor (see supervisor.py) kills what remains of its job when the
launcher or the agent ends in any way. The agent is a subreaper too and kills its own descendants,
in case the supervisor itself was killed.
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
    """Orphans among this process's descendants become its children (PR_SET_CHILD_SUBREAPER, Linux
    3.4). Raises OSError.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)


class JobProcess:
    """A launcher with everything below it. Start it from the main thread only.

    Raises OSError when the supervisor cannot be started; a command that cannot be run shows as exit
    code 126 or 127.
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
        """Of the supervisor."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while the launcher runs."""
        return self._process.poll()

    def forget(self) -> None:
        """Everything of it was killed."""
        self._process.poll()

    def kill(self) -> None:
        """SIGKILL to the supervisor, with which everything below it ends."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def terminate(self) -> None:
        """SIGTERM to the launcher, which stops its workers in order."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)


def sweep(limit_s: float = 10.0) -> list[int]:
    """Kill every descendant of this process. Returns those that cannot be killed."""
    remaining = kill_descendants(limit_s)
    reap_orphans()
    return remaining


def reap_orphans(keep: Container[int] = ()) -> None:
    """Take the exit codes of adopted orphans, so that they do not stay as zombies. ``keep``:
    children whose code somebody else takes.
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
