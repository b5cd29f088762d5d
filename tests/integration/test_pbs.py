"""MalleTrain on an imitated PBS, end to end: a malleable job trains on idle hosts, grows, gives way to main jobs and completes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.embedded import Site
from tests.integration.test_main_job import STEADY
from tests.scavenger.fake_pbs import FakePbs

pytestmark = pytest.mark.timeout(240)

CONFIG = """
[daemon]
state_dir = "{state}"
metrics_listen = ""
adopt_wait = "3 s"
[scheduler]
kind = "pbs"
poll_interval = "0.5 s"
[scheduler.pbs]
queue = "preemptable"
[gaps]
idle_for = "0 s"
hold = "1 s"
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
[profiling]
enabled = false
"""


class PbsSite(Site):
    """One daemon on ``pbs``."""

    def __init__(self, root: Path, pbs: FakePbs) -> None:
        self.root, self.pbs = root, pbs
        self.state, self.work = root / "state", root / "work"
        self.work.mkdir(parents=True)
        self.config = root / "site.toml"
        self.config.write_text(CONFIG.format(state=self.state))
        self.daemon: subprocess.Popen[bytes] | None = None

    def start_daemon(self) -> None:
        with (self.root / "daemon.log").open("ab") as log:
            argv = [sys.executable, "-m", "malletrain", "daemon", "--config", str(self.config)]
            # The daemon's commands speak for the user it runs as.
            environment = {**self.pbs.environment, "FAKE_PBS_USER": psutil.Process().username()}
            self.daemon = subprocess.Popen(argv, stdout=log, stderr=log, env=environment)
        self.until(self.answers, "the daemon answers")

    def processes(self) -> list[psutil.Process]:
        """Every process of a job of the imitated PBS."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("FAKE_PBS") == str(self.pbs.state_dir) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def stop(self) -> None:
        if self.daemon is not None and self.daemon.poll() is None:
            with contextlib.suppress(AssertionError):
                self.until(lambda: not self.pbs.leases(), "all leases are given back", 30.0)
            self.kill_daemon(15)
        left = self.pbs.leases()
        self.pbs.stop()
        self.until(lambda: not self.processes(), "no process is left", 20.0)
        assert not left, f"Leases were left over: {left}\n{self.daemon_log()}"


@contextlib.contextmanager
def pbs_site(root: Path, **options: object) -> Iterator[PbsSite]:
    made = PbsSite(root / "site", FakePbs(root / "machine", **options))  # type: ignore[arg-type]
    try:
        made.start_daemon()
        yield made
    except BaseException:
        print(made.daemon_log(), *(p.read_text(errors="replace")[-600:] for p in made.state.glob("leases/*.out")), sep="\n")
        raise
    finally:
        made.stop()


def test_a_job_grows_on_idle_hosts_gives_way_and_completes(tmp_path):
    with pbs_site(tmp_path, hosts=3) as site:
        first = site.pbs.submit("sleep 600", "-l", "walltime=00:30:00")
        site.pbs.until(lambda: site.pbs.jobs()[first]["state"] == "R", "a main job has a host")
        job = site.submit(site.script("steady $(x).py", STEADY), "a b", "$(id)", nodes=(1, 3))
        site.until(lambda: len(site.job(job).nodes) == 2, "the job runs on the hosts that are idle")
        site.until_samples(job, 20)
        site.pbs.edit(lambda state: state["jobs"][first].update(delete=True))
        site.until(lambda: len(site.job(job).nodes) == 3, "it grows when the queue empties")
        before = site.job(job).samples
        main = site.pbs.submit("sleep 1", "-l", "walltime=00:01:00", hosts=2)
        site.until(lambda: site.pbs.jobs()[main]["state"] == "F", "a main job of two hosts runs and ends")
        assert len(site.events("node-leaving")) == 2, "both leases were told, and the third was left alone"
        site.until(lambda: len(site.job(job).nodes) == 3, "it grows again")
        site.until_samples(job, before + 50)
        (site.work / "stop").touch()
        done = site.until_state(job, "completed", "failed")
        assert done.state == "completed", site.show(job).failure
        assert done.tries == 0
        site.until(lambda: not site.pbs.leases(), "every lease is given back")


def test_suspended_hosts_are_done_without_and_leave_nothing_running(tmp_path):
    with pbs_site(tmp_path, hosts=2, preempt_order="S") as site:
        script = site.script("steady.py", STEADY)
        job = site.submit(script, nodes=(1, 2))
        site.until(lambda: len(site.job(job).nodes) == 2, "the job runs on both hosts")
        site.until_samples(job, 20)
        main = site.pbs.submit("sleep 600", "-l", "walltime=00:30:00")
        site.pbs.until(lambda: site.pbs.jobs()[main]["state"] == "R", "a main job suspends a lease and runs")
        site.until(lambda: len(site.job(job).nodes) == 1, "the job does without the host")
        site.until_samples(job, site.job(job).samples + 50)
        site.until(lambda: len(site.pbs.leases()) == 1, "the suspended lease is deleted")
        held = [process for process in site.processes() if str(script) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE]
        assert len({process.environ()["MALLETRAIN_NODE"] for process in held if "MALLETRAIN_NODE" in process.environ()}) <= 1
        (site.work / "stop").touch()
        assert site.until_state(job, "completed", "failed").state == "completed"
        site.pbs.edit(lambda state: state["jobs"][main].update(delete=True))


def test_a_requeued_lease_that_begins_again_is_sent_away(tmp_path):
    with pbs_site(tmp_path, hosts=1, preempt_order="R") as site:
        job = site.submit(site.script("steady.py", STEADY), nodes=(1, 1))
        site.until(lambda: len(site.job(job).nodes) == 1, "the job runs")
        site.until_samples(job, 20)
        [old] = site.pbs.leases().values()
        site.pbs.tools.fails("qstat", "qstat: cannot connect to server pbs0")  # so that only the agent itself can give it away
        site.pbs.submit("exit 0")
        said = site.state / "leases" / f"{old['name'].rpartition('-')[2]}.out"
        site.until(lambda: "This lease has left" in said.read_text(), "the agent that begins again hears that it is not wanted")
        site.pbs.works("qstat")
        site.until(lambda: len(site.job(job).nodes) == 1, "a lease of the day after")
        site.until_samples(job, site.job(job).samples + 20)
        (site.work / "stop").touch()
        assert site.until_state(job, "completed", "failed").state == "completed"
