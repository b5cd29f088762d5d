"""A whole MalleTrain site on a real Slurm: the cluster of cluster.py, a daemon, and what Slurm starts for it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.integration.embedded import Site
from tests.slurm.cluster import SlurmCluster

CONFIG = """
[daemon]
state_dir = "{state}"
metrics_listen = ""
adopt_wait = "3 s"
{daemon}
[scheduler]
kind = "slurm"
poll_interval = "0.5 s"
[scheduler.slurm]
partition = "preemptable"
{slurm}
[gaps]
{gaps}
[jobs]
max_tries = 2
stop_grace = "1 s"
drain_timeout = "2 s"
[allocation]
settle = "0.3 s"
min_interval = "0 s"
give_back_after = "2 s"
rescale_up = "1 s"
rescale_down = "1 s"
start = "1 s"
{allocation}
[profiling]
enabled = false
"""


class SlurmTestSite(Site):
    """One daemon on ``slurm``. ``config``: more lines for the sections of the same name."""

    def __init__(self, root: Path, slurm: SlurmCluster, *, lines: str = "", gaps: str = "", allocation: str = "", daemon: str = "") -> None:
        self.root = root
        self.slurm = slurm
        self.state = root / "state"
        self.work = root / "work"
        self.work.mkdir(parents=True)
        self.config = root / "site.toml"
        self.config.write_text(CONFIG.format(state=self.state, slurm=lines, gaps=gaps, allocation=allocation, daemon=daemon))
        self.daemon: subprocess.Popen[bytes] | None = None

    def start_daemon(self) -> None:
        log = (self.root / "daemon.log").open("ab")
        argv = [sys.executable, "-m", "malletrain", "daemon", "--config", str(self.config)]
        self.daemon = subprocess.Popen(argv, stdout=log, stderr=log, env=self.slurm.environment)
        log.close()
        self.until(self.answers, "the daemon answers")

    def malletrain(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run the command line as a user would."""
        environment = {**self.slurm.environment, "MALLETRAIN_STATE_DIR": str(self.state), "COLUMNS": "160"}
        return subprocess.run(
            [sys.executable, "-m", "malletrain", *args], capture_output=True, text=True, env=environment, timeout=60, cwd=self.work
        )

    def agents(self) -> dict[str, psutil.Process]:
        found = {}
        for process in self.slurm.jobs_processes():
            with contextlib.suppress(psutil.Error):
                if "malletrain.agent" in process.cmdline() and process.environ().get("MALLETRAIN_NODE"):
                    found[process.environ()["MALLETRAIN_NODE"]] = process
        return found

    def workers(self, script: Path) -> list[psutil.Process]:
        found = []
        for process in self.slurm.jobs_processes():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if str(script) in line and "-u" in line[:3] and "_tether" not in " ".join(line):
                    found.append(process)
        return found

    def daemon_log(self, lines: int = 60) -> str:
        path = self.root / "daemon.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else "(no log)"

    def stop(self) -> None:
        """End the daemon and its leases; fails when a lease or a process is left over."""
        if self.daemon is not None and self.daemon.poll() is None:
            for job in self._unfinished():
                with contextlib.suppress(RuntimeError), self.client() as client:
                    client.cancel([job])
            with contextlib.suppress(AssertionError):
                self.until(lambda: not self.slurm.leases(), "all leases are given back", 30.0)
            self.kill_daemon(15)
        left = self.slurm.leases()
        if left:
            self.slurm.run("scancel", *left)
        self.slurm.until(lambda: not self.slurm.leases(), "the leases end")
        self.slurm.until(lambda: not self.agents(), "no agent is left")
        assert not left, f"Leases were left over: {left}\n{self.daemon_log()}"

    def _unfinished(self) -> list[str]:
        with contextlib.suppress(RuntimeError), self.client() as client:
            return [j.id for j in client.jobs() if j.state not in ("completed", "failed", "cancelled")]
        return []


@contextlib.contextmanager
def slurm_site(root: Path, slurm: SlurmCluster, **options: str) -> Iterator[SlurmTestSite]:
    """A site with a running daemon; everything of it is gone at the end."""
    made = SlurmTestSite(root, slurm, **options)
    try:
        made.start_daemon()
        yield made
    except BaseException:
        # pytest shows this beside the failure.
        print(made.daemon_log(200), *sorted(made.state.glob("leases/*.out")), sep="\n")
        print(*(path.read_text(errors="replace")[-400:] for path in sorted(made.state.glob("leases/*.out"))), sep="\n")
        print(slurm.jobs() if "slurmctld" in slurm.processes else "(no slurmctld)", slurm.log("slurmctld"), sep="\n")
        raise
    finally:
        made.stop()
        os.sync()
