"""A PBS for tests: the imitation of pbs_machine.py behind tools that can be told to hang, fail or
print garbage (fake_tools.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import waiting
from tests.scavenger.batch.fake_tools import FakeTools
from tests.scavenger.pbs import pbs_state
from tests.waiting import NEVER_S, PATIENCE_S

MACHINE = str(Path(__file__).with_name("pbs_machine.py"))
ASK = """
# A command of PBS, called with the arguments "$@": its process asks the one that serves the state.
[ -p '{state}'/requests ] || exit 255  # it has ended
answer='{state}'/{name}.$$
mkfifo "$answer"
exec 3<>"$answer"
printf '%s\\0' "$stdin" "$TZ" "$FAKE_PBS_USER" {name} "$@" >"$answer.request"
echo "$answer" >'{state}'/requests
read -r code <&3
cat "$answer.out"
[ -s "$answer.err" ] && cat "$answer.err" >&2
exit "$code"
"""
"""What a tool runs: no interpreter of its own, which would cost ten times as much."""
NAMES = ("qstat", "pbsnodes", "pbs_rstat", "qmgr", "qsub", "qdel", "qsig")
QUEUES: dict[str, dict[str, Any]] = {
    "workq": {"Priority": 0},
    "expressq": {"Priority": 200},
    "preemptable": {"Priority": 10, "kill_delay": 8},
}
PATIENT = {**QUEUES, "preemptable": {**QUEUES["preemptable"], "kill_delay": NEVER_S}}
"""kill_delay so long that PBS does not kill a lease that leaves slowly."""


def hosts_of(count: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Hosts n1, n2, … with one vnode each, named as in the recordings, with as much memory as
    a machine has: never a whole number of megabytes.
    """
    return {f"n{i}": {f"pbs0[{i}]": {"ncpus": 2, "mem": "2097852kb"}} for i in range(1, count + 1)}


class FakePbs:
    """One imitated PBS in ``root``. ``environment`` finds its commands before the real ones."""

    def __init__(
        self,
        root: Path,
        hosts: int | dict[str, Any] = 4,
        queues: dict[str, Any] | None = None,
        preempt_order: str = "D",
    ) -> None:
        self.root = root
        self.state_dir = root / "pbs"
        self.state_dir.mkdir(parents=True)
        made = pbs_state.new_state(
            hosts_of(hosts) if isinstance(hosts, int) else hosts, queues or QUEUES, preempt_order
        )
        (self.state_dir / "state.json").write_text(json.dumps(made))
        self.tools = FakeTools(root / "bin", NAMES)
        self.environment = self.tools.environment
        os.mkfifo(self.state_dir / "requests")
        for name in NAMES:
            ask = ASK.format(state=self.state_dir, name=name)
            self.tools.runs(
                name,
                f'[ -f "$here/{name}.mode" ] || [ -f "$here/{name}.out" ] || {{ {ask} }}',
            )
        self.server = subprocess.Popen([sys.executable, "-I", "-S", MACHINE, str(self.state_dir)])

    def works(self, name: str) -> None:
        """The tool is itself again."""
        (self.tools.root / f"{name}.out").unlink(missing_ok=True)
        self.tools.works(name)

    def edit(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the state, as an administrator would."""
        with pbs_state.state_of(self.state_dir) as state:
            change(state)

    def state(self) -> dict[str, Any]:
        with pbs_state.state_of(self.state_dir) as state:
            return dict(state)

    def jobs(self, *states: str) -> dict[str, dict[str, Any]]:
        """Jobs by id, of these states (all)."""
        return {
            number: job
            for number, job in self.state()["jobs"].items()
            if not states or job["state"] in states
        }

    def leases(self, *states: str) -> dict[str, dict[str, Any]]:
        return {
            n: j
            for n, j in self.jobs(*(states or ("Q", "H", "R", "E", "S"))).items()
            if j["name"].startswith("malletrain-")
        }

    def processes(self, job_id: str) -> list[int]:
        """Processes that were started in a job."""
        mark = f"PBS_JOBID={job_id}".encode()
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                ours = str(self.state_dir).encode() in (data := (folder / "environ").read_bytes())
            except OSError:
                continue
            if ours and mark in data.split(b"\0"):
                pids.append(int(folder.name))
        return pids

    def submit(self, text: str, *options: str, queue: str = "expressq", hosts: int = 1) -> str:
        """A job of some user."""
        argv = [
            str(self.tools.root / "qsub"),
            "-q",
            queue,
            "-l",
            f"select={hosts}:ncpus=2",
            *options,
        ]
        script = f"#!/bin/sh\n{text}\n"
        return subprocess.run(
            argv, input=script, capture_output=True, text=True, check=True, env=self.environment
        ).stdout.strip()

    def until(self, condition: Callable[[], object], what: str) -> Any:
        return waiting.until(condition, what, 0.03, lambda: f"Jobs: {self.jobs()}")

    def stop(self) -> None:
        """End it and every job of it."""
        (self.state_dir / "stop").touch()
        self.server.wait(PATIENCE_S)
