"""Faults while a job trains on several hosts, and whether every sample counts once all the same:
:mod:`tests.hosts.exact`.
"""

import signal
import time

import pytest

pytest.importorskip("torch")

from tests.hosts.exact import Training

pytestmark = pytest.mark.sites
MODES = pytest.mark.parametrize("mode", ["restart", "live"])
LENGTHS = pytest.mark.parametrize("seconds", [20, 120])


def lasts(site, seconds):
    """The trouble goes on for so long; that is what is tried."""
    began = time.monotonic()
    site.until(lambda: time.monotonic() - began > seconds, "time has passed")


@MODES
@LENGTHS
def test_a_node_that_is_cut_off_for_a_while_costs_no_sample(boot, mode, seconds):
    # longer than it is away: else its lease is cancelled, and it is left alone for minutes
    site = boot(3, allocation='lease_wait = "15 min"').start()
    training = Training(site, mode, "2:3")
    training.trains(3)
    away = site.bed.nodes[2]
    site.bed.link(away, up=False)
    site.until(lambda: [e for e in site.events("node-lost") if e["node"] == "n3"], "n3 is lost")
    training.trains(2)
    lasts(site, seconds)
    site.bed.link(away, up=True)
    training.trains(3)
    assert {e["node"] for e in site.events("node-lost")} == {"n3"}
    training.finish()
    if mode == "live":
        assert not training.back()


@MODES
def test_a_node_whose_power_fails_costs_no_sample(boot, mode):
    site = boot(3).start()
    training = Training(site, mode, "2:3")
    training.trains(3)
    first = next(n for n in site.bed.nodes if n.name == training.trace()[-1].node)
    first.power_off()
    training.trains(2)
    # In live mode those who stay train on before the daemon gives the node up.
    site.until(lambda: site.events("node-lost"), "the node is given up")
    training.finish()
    assert {e["node"] for e in site.events("node-lost")} == {first.name}
    if mode == "live":
        assert not training.back()


@MODES
@LENGTHS
@pytest.mark.parametrize("trouble", ["cable", "stopped"])
def test_the_heads_trouble_costs_no_step(boot, mode, trouble, seconds):
    site = boot(3).start()
    training = Training(site, mode, "3:3")
    training.trains(3)
    rounds = len(site.events("round-formed"))
    if trouble == "cable":
        site.bed.link(site.bed.head, up=False)
    else:
        site.signal(signal.SIGSTOP)
    lasts(site, seconds)
    training.trains(3)  # while nobody hears of it
    if trouble == "cable":
        site.bed.link(site.bed.head, up=True)
    else:
        site.signal(signal.SIGCONT)
    site.until(lambda: site.events("daemon-partitioned"), "the daemon knows whose trouble it is")
    training.trains(3)
    job = training.finish()
    assert not [e["sentence"] for e in site.events("node-lost", "node-vanished")], site.events()
    assert len(site.events("round-formed")) == rounds
    assert not training.back()
    assert job["samples"] == training.trace()[-1].position


@MODES
def test_a_daemon_that_is_killed_finds_its_job_at_work(boot, mode):
    site = boot(3).start()
    training = Training(site, mode, "3:3")
    training.trains(3)
    rounds = len(site.events("round-formed"))
    site.signal(signal.SIGKILL)
    training.trains(3)
    site.start()
    site.until(lambda: site.events("job-adopted"), "the job is adopted")
    training.trains(3)
    job = training.finish()
    assert len(site.events("round-formed")) == rounds
    assert len(site.events("job-started")) == 1
    assert not training.back()
    assert job["samples"] == training.trace()[-1].position
