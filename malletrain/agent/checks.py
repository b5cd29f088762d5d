"""Runs a health check as a process under a supervisor, so that none of its processes outlives the
check, its time limit or the agent, in whatever group or session it is.

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
_MOST_BYTES = 4 << 20


class CheckProcess:
    """One run of a check.

    Args:
        command: it and its arguments.
        log: file for what it prints.
        node: name of the node, which the check finds in MALLETRAIN_NODE.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: tuple[str, ...], log: Path, node: str) -> None:
        self._log = log
        log.unlink(missing_ok=True)
        argv = supervised_command(["/bin/sh", "-c", _SCRIPT, "sh", *command], os.getpid(), "/", log)
        # What concerns the agent (where the daemon is, its lease) is none of the check's business.
        environment = {n: v for n, v in os.environ.items() if not n.startswith("MALLETRAIN_")}
        environment[env.NODE] = node
        self._process = subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def over(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """End it and everything it started. Nothing is waited for."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGHUP)  # the supervisor kills what is below it

    @property
    def code(self) -> int | None:
        """Its exit code; None: it was killed before it had one."""
        match = _ENDED.search(self._read())
        return int(match[1]) if match else None

    @property
    def printed(self) -> str:
        """What it has printed."""
        return _ENDED.sub("", self._read())

    def _read(self) -> str:
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - _MOST_BYTES))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""
