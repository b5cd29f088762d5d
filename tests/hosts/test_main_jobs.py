"""The main scheduler takes its nodes, its own daemons die, disks are full: what the training on
several hosts loses of it, told to the sample by :mod:`tests.hosts.exact`.
"""

import itertools
import signal

import pytest

pytest.importorskip("torch")

from tests.hosts.exact import Training

pytestmark = pytest.mark.sites
MODES = pytest.mark.parametrize("mode", ["restart", "live"])
FAILED = "poll failed"
ENOUGH_S = 3600
"""Grace of preemption. A process that stayed until its end would keep the test from ending."""


class MainJob:
    """A job of the main scheduler on all nodes of ``site``."""

    def __init__(self, site, nodes):
        self.site, self.begun, self.enough = site, site.work / "begun", site.work / "main-enough"
        wait = f"touch {self.begun}; until [ -e {self.enough} ]; do sleep 0.1; done"
        options = ("--output=/dev/null", f"--nodes={nodes}", "--exclusive", "--wrap", wait)
        site.bed.head.run("sbatch", "--partition=batch", *options)

    def runs(self):
        self.site.until(self.begun.exists, "the main job has its nodes")

    def end(self):
        self.enough.touch()


def workers(site):
    """The nodes on which the training has processes."""
    return [node.name for node in site.bed.nodes if node.processes("train.py")]


@MODES
def test_a_main_job_takes_all_nodes_and_the_training_goes_on_where_it_was(boot, mode):
    site = boot(3, grace=ENOUGH_S).start()
    training = Training(site, mode, "2:3")
    training.trains(3)
    assert len(workers(site)) == 3
    main = MainJob(site, 3)
    main.runs()
    site.until(lambda: site.job(training.id)["state"] == "suspended", "the job waits")
    assert not workers(site)
    main.end()
    training.trains(3)
    job = training.finish()
    assert not training.back()
    assert job["samples"] == training.trace()[-1].position
    assert job["tries"] == 0
    assert not site.events("drain-without-snapshot")


@MODES
def test_a_main_job_does_not_wait_for_a_training_that_just_starts(boot, mode):
    site = boot(3, grace=ENOUGH_S).start()
    training = Training(site, mode, "2:3")
    site.until(lambda: site.events("round-formed"), "its workers start")
    main = MainJob(site, 3)
    main.runs()
    main.end()
    training.trains(3)
    job = training.finish()
    assert not training.back()
    assert job["tries"] == 0


@MODES
def test_without_a_daemon_a_main_job_gets_its_nodes_and_nothing_is_lost(boot, mode):
    site = boot(4, grace=ENOUGH_S).start()
    training = Training(site, mode, "2:4")
    training.trains(4)
    site.signal(signal.SIGKILL)
    main = MainJob(site, 4)
    main.runs()
    assert not workers(site)
    site.start()
    main.end()
    training.trains(4)
    training.finish()
    assert not training.back()


@MODES
def test_slurms_own_daemons_die_and_nobody_notices(boot, mode):
    site = boot(3).start()
    training = Training(site, mode, "3:3")
    training.trains(3)
    rounds = len(site.events("round-formed"))
    for host in (site.bed.head, site.bed.nodes[0]):
        site.bed.kill(host)
    site.until(lambda: FAILED in site.log(), "the daemon says that Slurm is away")
    training.trains(3)
    for host in (site.bed.head, site.bed.nodes[0]):
        site.bed.begin(host)
    site.until(lambda: "polls work again" in site.log(), "the daemon says that it is back")
    training.trains(3)
    failures = [line.split("reason=")[1] for line in site.log().splitlines() if FAILED in line]
    assert all(new != old for old, new in itertools.pairwise(failures)), "each is said once"
    job = training.finish()
    assert len(site.events("round-formed")) == rounds
    assert not training.back()
    assert job["samples"] == training.trace()[-1].position


@MODES
def test_where_the_disk_is_full_training_goes_on_and_what_is_kept_is_whole(boot, mode):
    """A disk of 600 KB on each node, for a state of 800; later there is room."""
    site = boot(2).start()
    disk = site.work / "disk"
    disk.mkdir()
    for node in site.bed.nodes:
        node.run("mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk))
    training = Training(site, mode, "2:2", "--env", "SNAPSHOT=disk/run.pt")
    training.trains(2)
    site.until(lambda: site.events("job-notice"), "somebody says that nothing can be kept")
    training.trains(2)
    for node in site.bed.nodes:
        node.run("mount", "-o", "remount,size=50m", str(disk))

    def nodes_with_snapshot():
        return [n for n in site.bed.nodes if "run.pt" in n.run("ls", str(disk)).split()]

    site.until(nodes_with_snapshot, "the state is kept")
    job = training.finish()
    assert not training.back()
    assert job["tries"] == 0
