"""A whole MalleTrain site on a batch scheduler, real or imitated: one daemon, and what the
scheduler starts for it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import psutil

from tests.forks import Forked
from tests.integration.embedded import LIMITS, Site

CONFIG = """
[daemon]
state_dir = "{state}"
advertise = "127.0.0.1"
metrics_listen = ""
agent_timeout = "60 s"
adopt_wait = "60 s"
{daemon}
[scheduler]
kind = "{kind}"
poll_interval = "0.5 s"
[scheduler.{kind}]
{lines}
[gaps]
{gaps}
[jobs]
{limits}
stop_grace = "1 s"
[allocation]
lease_wait = "1 h"
debounce = "0.3 s"
min_interval = "0 s"
release_after = "2 s"
rescale_up = "1 s"
rescale_down = "1 s"
start = "1 s"
{allocation}
[profiling]
enabled = false
"""


class BatchSite(Site):
    """``environment``: in which the scheduler's commands are found. The others: more lines for the
    sections of the configuration.
    """

    kind: str

    def __init__(
        self,
        root: Path,
        environment: Mapping[str, str],
        *,
        lines: str = "",
        gaps: str = "",
        allocation: str = "",
        daemon: str = "",
    ) -> None:
        self.root, self.environment = root, environment
        self.state, self.work = root / "state", root / "work"
        self.work.mkdir(parents=True)
        self.config = root / "site.toml"
        text = CONFIG.format(
            state=self.state,
            kind=self.kind,
            limits=LIMITS,
            lines=lines,
            gaps=gaps,
            allocation=allocation,
            daemon=daemon,
        )
        self.config.write_text(text)
        self.forks_daemon = True
        self.daemon: Forked | subprocess.Popen[bytes] | None = None

    def leases(self) -> Collection[str]:
        """The jobs that the scheduler has of the leases, until they have ended."""
        raise NotImplementedError

    def processes(self) -> list[psutil.Process]:
        """Every process of a job of the scheduler."""
        raise NotImplementedError

    def clear(self, leases: Collection[str]) -> None:
        """End leases that are left over, and wait until no process remains."""
        raise NotImplementedError

    def tell(self) -> str:
        """Return the scheduler's own information about a failure."""
        return ""

    def malletrain(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run the command line as a user would."""
        environment = {
            **self.environment,
            "MALLETRAIN_STATE_DIR": str(self.state),
            "COLUMNS": "160",
        }
        return subprocess.run(
            [sys.executable, "-m", "malletrain", *args],
            capture_output=True,
            text=True,
            env=environment,
            cwd=self.work,
        )

    def agents(self) -> dict[str, psutil.Process]:
        by_node = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if "malletrain.agent" in process.cmdline() and (
                    node := process.environ().get("MALLETRAIN_NODE")
                ):
                    by_node[node] = process
        return by_node

    def workers(self, script: Path) -> list[psutil.Process]:
        processes = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if str(script) in line and "-u" in line[:3] and "supervisor" not in " ".join(line):
                    processes.append(process)
        return processes

    def stop(self) -> None:
        """End the daemon and its leases; fails when a lease or a process is left over."""
        if self.daemon is not None and self.daemon.poll() is None:
            with contextlib.suppress(RuntimeError), self.client() as client:
                client.cancel(
                    [
                        job.id
                        for job in client.jobs()
                        if job.state not in ("completed", "failed", "cancelled")
                    ]
                )
            with contextlib.suppress(AssertionError):
                self.until(lambda: not self.leases(), "all leases are given back")
            self.kill_daemon(15)
        leases = self.leases()
        self.clear(leases)
        assert not leases, f"Leases were left over: {leases}\n{self.daemon_log()}"


SiteT = TypeVar("SiteT", bound=BatchSite)


@contextlib.contextmanager
def running(made: SiteT) -> Iterator[SiteT]:
    """``made`` with a running daemon; everything of it is gone at the end."""
    try:
        made.start_daemon()
        yield made
    except BaseException:
        # pytest shows this beside the failure.
        lease_logs = [
            f"{path}\n{path.read_text(errors='replace')[-600:]}"
            for path in sorted(made.state.glob("leases/*.out"))
        ]
        print(made.daemon_log(200), *lease_logs, made.tell(), sep="\n")
        raise
    finally:
        made.stop()
        os.sync()
