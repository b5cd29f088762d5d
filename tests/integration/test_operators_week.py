"""What an operator does in a week, on one site and one day after another, while a training goes on:
each sample of it is trained on once in the state that is kept, and no day costs the job a try.
"""

from __future__ import annotations

import getpass
import os
import signal
import subprocess

import pytest

from malletrain import __version__
from tests.disks import fill, small_disk
from tests.integration.embedded import gone
from tests.integration.installed import Installed
from tests.integration.test_two_daemons import elsewhere, with_database

TRAINING = """
import os, time, torch, torch.distributed as dist, malletrain
dist.init_process_group("gloo")
sampler = malletrain.ElasticSampler(6000, global_batch_size=6, seed=1)
seen = torch.nn.Embedding(6000, 1)
snapshot = malletrain.Snapshot("week.snap", model=seen, sampler=sampler, every_s=2)
if not snapshot.restore():
    torch.nn.init.zeros_(seen.weight)
for epoch in sampler.epochs(1):
    for batch in sampler:
        time.sleep(0.05)
        for _ in range(50 if sampler.state_dict()["position"] > 600 else 0):
            if not os.path.exists("sunday"):
                time.sleep(0.02)
        added = torch.zeros(6000, 1)
        added[batch] = 1.0
        dist.all_reduce(added)
        with torch.no_grad():
            seen.weight += added
        sampler.advance()
        malletrain.report(len(batch))
        snapshot.step()
print("seen", int(seen.weight.min()), "to", int(seen.weight.max()), "times", flush=True)
snapshot.save()
dist.destroy_process_group()
"""
"""Counts in its model how often it was trained on each sample. It crawls until Sunday."""


class Week:
    """The site, and the training that goes on for the week."""

    def __init__(self, site: Installed) -> None:
        self.site = site
        self.job = ""

    def command(self, *words: str, status: int = 0) -> str:
        """What a command of the operator prints; it ends with this exit status."""
        state = [] if "--config" in words else ["--state-dir", str(self.site.state)]
        done = subprocess.run(
            [self.site.python, "-m", "malletrain", *words, *state],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.site.root,  # not that of the tests, whose malletrain would come first
        )
        assert done.returncode == status, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        return done.stdout + done.stderr

    def goes_on(self, nodes: int) -> None:
        """Wait until the training runs on as many nodes and has processed more samples."""
        site = self.site
        site.until(lambda: len(site.job(self.job).nodes) == nodes, f"it runs on {nodes} nodes")
        site.until_samples(self.job, site.job(self.job).samples + 6)

    # --- the days ---

    def monday_installs(self) -> None:
        assert "cannot be used" not in self.command("check", "--config", str(self.site.config))
        self.site.start_daemon()
        script = self.site.script("week.py", TRAINING)
        self.job = self.site.submit(script, nodes=(1, 3), name="week")
        self.goes_on(3)

    def tuesday_changes_the_configuration(self) -> None:
        good = self.site.config.read_text()
        self.site.config.write_text(good.replace("max_tries = 2", "max_trys = 2"))
        assert "max_tries" in self.command("reload", status=1), "the error names the key"
        self.site.config.write_text(good.replace("max_tries = 2", "max_tries = 3"))
        assert "jobs.max_tries: 2 -> 3" in self.command("reload")
        self.goes_on(3)

    def wednesday_repairs_a_node(self) -> None:
        self.command("drain", "n2", "--why", "a fan")
        self.goes_on(2)
        self.site.until(lambda: "n2" not in self.site.agents(), "nothing of ours runs there")
        assert "a fan" in self.command("nodes", "--explain")
        self.command("resume", "n2")
        self.goes_on(3)

    def wednesday_night_upgrades(self) -> None:
        site = self.site
        before = set(site.agents().values())
        assert site.kill_daemon(signal.SIGTERM) == 0
        site.install(__version__)
        site.start_daemon()
        self.goes_on(3)
        with site.client() as client:
            assert client.status().version == __version__
        assert set(site.agents().values()) == before, "agents of before keep the job"

    def thursday_restores_the_database_elsewhere(self, third: Installed) -> None:
        """The head node's disk is broken; there is a backup of the morning."""
        site = self.site
        copy = site.root / "thursday.db"
        self.command("db", "backup", "--config", str(site.config), str(copy))
        self.goes_on(3)
        site.kill_daemon()
        self.site = third
        self.command("db", "restore", "--config", str(third.config), str(copy))
        third.launch_daemon()
        third.until(lambda: third.daemon.poll() is not None, "it does not start")
        assert "malletrain db adopt" in third.daemon_log()
        self.command("db", "adopt", "--config", str(third.config))
        third.start_daemon()
        third.until(
            lambda: third.events("lease-unheard"), "leases whose agents do not find it are ended"
        )
        self.goes_on(3)

    def friday_has_a_frozen_scheduler(self) -> None:
        site = self.site
        os.kill(site.cluster.pid, signal.SIGSTOP)
        try:
            with site.client() as client:
                site.until(lambda: client.status().poll_error, "the daemon says so")
            assert "The main scheduler could not be asked" in self.command("status")
            site.until_samples(self.job, site.job(self.job).samples + 6)
        finally:
            os.kill(site.cluster.pid, signal.SIGCONT)
        with site.client() as client:
            site.until(lambda: not client.status().poll_error, "polls work again")
        self.goes_on(3)

    def friday_night_has_a_full_disk(self) -> None:
        site = self.site
        fill(site.state)
        processed = site.job(self.job).samples
        site.until(lambda: site.daemon.poll() is not None, "the daemon ends")
        assert "disk" in site.daemon_log().lower()
        site.launch_daemon()
        assert site.daemon.wait() != 0, "it does not start on a full disk"
        (site.state / "full").unlink()
        site.start_daemon()
        site.until_samples(self.job, processed + 6)
        self.goes_on(3)

    def saturday_loses_the_head_node(self, second: Installed) -> None:
        site = self.site
        second.launch_daemon()
        site.until(lambda: second.has_logged("this one waits and takes over"), "it waits")
        site.kill_daemon()
        second.until(second.answers, "the second daemon has taken over")
        self.site = second
        self.goes_on(3)
        node = second.job(self.job).nodes[0]
        agent = second.agents()[node]
        agent.send_signal(signal.SIGTERM)
        second.until(lambda: gone(agent), "the main scheduler has its node")
        self.goes_on(3)

    def sunday_looks_at_what_was_done(self) -> None:
        site = self.site
        (site.work / "sunday").touch()
        done = site.until_state(self.job, "completed", "failed")
        assert done.state == "completed", site.show(self.job).failure
        assert done.tries == 0, site.events(job=self.job)
        assert "seen 1 to 1 times" in self.command("logs", self.job)
        assert getpass.getuser() in self.command("usage")
        site.until(lambda: not site.agents(), "all leases are given back")


@pytest.mark.thorough
def test_a_week(tmp_path):
    state = tmp_path / "site" / "other" / "state"
    state.mkdir(parents=True)
    with small_disk(state, "64m"):
        state.chmod(0o700)
        site = Installed(tmp_path / "site", nodes=3, grace_s=60.0)
        site.state.chmod(0o700)
        third = elsewhere(site)
        with_database(third, f"sqlite:///{state}/shared.db")
        week = Week(site)
        second = elsewhere(third)
        try:
            week.monday_installs()
            week.tuesday_changes_the_configuration()
            week.wednesday_repairs_a_node()
            week.wednesday_night_upgrades()
            week.thursday_restores_the_database_elsewhere(third)
            week.friday_has_a_frozen_scheduler()
            week.friday_night_has_a_full_disk()
            week.saturday_loses_the_head_node(second)
            week.sunday_looks_at_what_was_done()
        finally:
            for each in (second, third):
                if each.daemon is not None and each.daemon.poll() is None:
                    each.kill_daemon()
            site.stop()
