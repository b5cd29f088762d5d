"""MalleTrain on the hosts of the bed: the daemon on the head, used by its command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.hosts.bed import Bed
from tests.waiting import PATIENCE_S, until

PORT = 7443
CONFIG = """
[daemon]
state_dir = "{state}"
listen = "tcp://0.0.0.0:{port}"
metrics_listen = ""
{daemon}
[scheduler]
kind = "slurm"
poll_interval = "0.5 s"
[scheduler.slurm]
partition = "preemptable"
[gaps]
idle_for = "0 s"
hold = "0 s"
[jobs]
max_tries = 1
{jobs}
[nodes]
{fabric}
[allocation]
settle = "0.3 s"
min_interval = "0 s"
{allocation}
[profiling]
enabled = false
"""
SECTIONS = ("daemon", "allocation", "jobs", "fabric")


class HostsSite:
    """One daemon of root's on the head of ``bed``, with its files below ``folder``. ``lines``: more
    lines of a section (``fabric``: of ``[nodes]``).
    """

    def __init__(self, bed: Bed, folder: Path, **lines: str) -> None:
        self.bed, self.folder = bed, folder
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        self.state = folder / "state"
        self.config = folder / "site.toml"
        self.config.write_text(
            CONFIG.format(state=self.state, port=PORT, **dict.fromkeys(SECTIONS, "") | lines)
        )
        self.environment = {**os.environ, "MALLETRAIN_STATE_DIR": str(self.state)}

    def start(self) -> HostsSite:
        """Start the daemon and wait until it answers."""
        argv = [sys.executable, "-m", "malletrain", "daemon", "--config", str(self.config)]
        self.bed.head.start(*argv, log="malletraind.log", environment=self.environment)
        until(
            lambda: self._command("status", "--json").returncode == 0,
            "the daemon answers",
            details=self.bed.head.said,
        )
        return self

    def signal(self, number: signal.Signals) -> None:
        """Send the daemon a signal."""
        pid = json.loads((self.state / "daemon.json").read_text())["pid"]
        self.bed.head.run("kill", f"-{number.name.removeprefix('SIG')}", str(pid))

    def _command(self, *argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "malletrain", *argv]
        return subprocess.run(
            self.bed.head.inside("env", f"--chdir={self.work}", *command),
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=PATIENCE_S,
        )

    def ask(self, *argv: str) -> Any:
        """What a command of ``malletrain`` says, from its JSON."""
        made = self._command(argv[0], "--json", *argv[1:])
        assert made.returncode == 0, f"{argv}: {made.stderr}\n{self.bed.head.said()}"
        lines = made.stdout.strip().splitlines()
        return json.loads(made.stdout) if argv[0] != "events" else [json.loads(x) for x in lines]

    def submit(self, name: str, text: str, nodes: str, *options: str) -> str:
        """Submit a script; returns the job's id."""
        (self.work / name).write_text(text)
        given = ("--nodes", nodes, "--no-profile", "--env", "MALLETRAIN_PRELOAD=0", *options)
        return str(self.ask("submit", *given, name)["id"])

    def job(self, job: str) -> Any:
        """A job as ``malletrain show`` has it."""
        return self.ask("show", job)["job"]

    def events(self, *kinds: str) -> list[Any]:
        """The events of these kinds."""
        return [e for e in self.ask("events") if not kinds or e["kind"] in kinds]

    def until(self, condition: Any, what: str) -> Any:
        """Wait, and say what the hosts said if it was in vain."""
        return until(
            condition,
            what,
            pause_s=0.3,
            details=lambda: "\n".join(host.said() for host in self.bed.hosts),
        )
