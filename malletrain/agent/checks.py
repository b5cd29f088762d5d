"""Runs a health check as a process under a supervisor, so that none of its processes outlives the
check, its time limit or the agent, whatever its process group or session is.

The exit code is read from the supervisor's output, because the agent reaps all its children itself
(:mod:`malletrain.agent.process`). Decides nothing.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

from malletrain.agent.launch import supervised_command
from malletrain.protocol import env

_ENDED = re.compile(r"\nmalletrain-check-ended (\d+)\n")
_SCRIPT = '"$@" </dev/null; printf "\\nmalletrain-check-ended %s\\n" "$?"'
_MAX_OUTPUT_BYTES = 4 << 20


class CheckProcess:
    """One run of a check.

    Args:
        command: the program and its arguments.
        log: file for its output.
        node: name of the node, which the check gets in MALLETRAIN_NODE.

    Raises:
        OSError: the check cannot be started.
    """

    def __init__(self, command: tuple[str, ...], log: Path, node: str) -> None:
        self._log = log
        log.unlink(missing_ok=True)
        argv = supervised_command(["/bin/sh", "-c", _SCRIPT, "sh", *command], os.getpid(), "/", log)
        # The check does not get the variables of the agent (address of the daemon, lease).
        environment = {n: v for n, v in os.environ.items() if not n.startswith("MALLETRAIN_")}
        environment[env.NODE] = node
        self._process = subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def over(self) -> bool:
        """Returns whether the check has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the check and all its descendants. Does not wait for them."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGHUP)  # the supervisor kills its descendants

    @property
    def code(self) -> int | None:
        """Exit code; None if the check was killed."""
        match = _ENDED.search(self._read())
        return int(match[1]) if match else None

    @property
    def printed(self) -> str:
        """Output of the check."""
        return _ENDED.sub("", self._read())

    def _read(self) -> str:
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - _MAX_OUTPUT_BYTES))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""
