"""Somebody who uses MalleTrain's command line on the head of the bed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.hosts.bed import Bed
from tests.waiting import PATIENCE_S, until


class Account:
    """Root, or the user ``user`` of the head.

    Args:
        bed: the hosts.
        work: where scripts are put and jobs run.
        user: whose; empty: root's.
        environment: of every command, besides what a log-in has.
    """

    def __init__(
        self, bed: Bed, work: Path, user: str = "", environment: Mapping[str, str] | None = None
    ) -> None:
        self.bed, self.work, self.user = bed, work, user
        variables = dict(environment or {})
        if user:
            login = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "USER": user}
            variables = {**login, "HOME": str(work), **variables}
        self.environment = variables if user else {**os.environ, **variables}

    def become(self, *argv: str) -> list[str]:
        """The command that runs ``argv`` as this user, wherever it is run."""
        ids = (f"--reuid={self.user}", f"--regid={self.user}", "--init-groups")
        if self.user and self.user in self.bed.users:
            ids = (ids[0], "--regid=users", ids[2])
        return ["setpriv", *ids, "--", *argv] if self.user else list(argv)

    def shell(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Return the result of a command on the head."""
        command = ["env", f"--chdir={self.work}", *argv]
        return subprocess.run(
            self.bed.head.inside(*self.become(*command)),
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=PATIENCE_S,
        )

    def command(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Return the result of ``malletrain`` with these arguments."""
        return self.shell(sys.executable, "-m", "malletrain", *argv)

    def ask(self, *argv: str) -> Any:
        """Return the JSON output of a command of ``malletrain``."""
        made = self.command(argv[0], "--json", *argv[1:])
        assert made.returncode == 0, f"{argv}: {made.stderr}\n{self.bed.head.log_ends()}"
        lines = made.stdout.strip().splitlines()
        return json.loads(made.stdout) if argv[0] != "events" else [json.loads(x) for x in lines]

    def submit(self, name: str, text: str, nodes: str, *options: str) -> str:
        """Submit a script; return the job's id."""
        (self.work / name).write_text(text)
        arguments = ("--nodes", nodes, "--no-profile", "--env", "MALLETRAIN_PRELOAD=0", *options)
        return str(self.ask("submit", *arguments, name)["id"])

    def job(self, job: str) -> Any:
        """A job as ``malletrain show`` prints it."""
        return self.ask("show", job)["job"]

    def events(self, *kinds: str) -> list[Any]:
        """The events of these kinds."""
        return [e for e in self.ask("events") if not kinds or e["kind"] in kinds]

    def until(self, condition: Any, what: str) -> Any:
        """Wait; a failure shows the ends of the hosts' logs."""
        return until(
            condition,
            what,
            pause_s=1.0,
            details=lambda: "\n".join(host.log_ends() for host in self.bed.hosts),
        )
