"""MalleTrain on the hosts of the bed: the daemon on the head, used by its command line."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from tests.hosts.account import Account
from tests.hosts.bed import Bed

PORT = 7443
CONFIG = """
[daemon]
state_dir = "{state}"
listen = "tcp://0.0.0.0:{port}"
metrics_listen = ""
agent_timeout = "10 s"
{daemon}
[scheduler]
kind = "slurm"
poll_interval = "0.5 s"
[scheduler.slurm]
partition = "preemptable"
{slurm}
[gaps]
idle_for = "0 s"
hold = "0 s"
[jobs]
max_tries = 1
{jobs}
[nodes]
{fabric}
[allocation]
debounce = "0.3 s"
min_interval = "0 s"
{allocation}
[profiling]
enabled = false
"""
LINES = {
    # limits that no test is about, longer than the busiest machine needs
    "jobs": 'warmup_timeout = "15 min"\njoin_timeout = "15 min"',
    **dict.fromkeys(("daemon", "slurm", "allocation", "fabric"), ""),
}


class HostsSite(Account):
    """One daemon on the head of ``bed``, with its files below ``folder``, used by the account of
    the daemon. ``account``: the daemon's user, who exists on the head; empty: root. ``lines``:
    additional lines of a section (``slurm``: of ``[scheduler.slurm]``, ``fabric``: of ``[nodes]``).
    """

    def __init__(self, bed: Bed, folder: Path, account: str = "", **lines: str) -> None:
        self.folder, self.state = folder, folder / "state"
        work = folder / "work"
        work.mkdir(parents=True)
        if account:
            for path in (folder, work):
                bed.head.run("chown", account, str(path))
        self.config = folder / "site.toml"
        self.config.write_text(CONFIG.format(state=self.state, port=PORT, **(LINES | lines)))
        super().__init__(bed, work, account, {"MALLETRAIN_STATE_DIR": str(self.state)})

    def start(self) -> HostsSite:
        """Start the daemon and wait until it answers."""
        argv = [sys.executable, "-m", "malletrain", "daemon", "--config", str(self.config)]
        self.bed.head.start(
            *self.become(*argv), log="malletraind.log", environment=self.environment
        )
        self.until(lambda: self.command("status", "--json").returncode == 0, "the daemon answers")
        return self

    def log(self) -> str:
        """Return the whole log of the daemon."""
        return self.bed.head.log("malletraind.log")

    def signal(self, number: signal.Signals) -> None:
        """Send the daemon a signal."""
        pid = json.loads((self.state / "daemon.json").read_text())["pid"]
        self.bed.head.run("kill", f"-{number.name.removeprefix('SIG')}", str(pid))
