"""What only shows where head and nodes are hosts of their own: names, routes, firewalls, cables."""

import os
import signal
import time

import pytest

from tests.hosts.bed import FRONT, HEAD

COUNT = """
import os, time
import malletrain
rank = os.environ["RANK"]
for step in range(10**6):
    time.sleep(0.05)
    malletrain.report(1)
    with open(f"count.{rank}.{os.uname().nodename}.{os.getpid()}", "a") as file:
        file.write(f"{step}\\n")
    if os.path.exists("enough"):
        break
"""
CALLS_ITSELF = "127.0.0.1 localhost head"
SOMEBODY = 4242
"""Another user's number."""


def counts(site):
    """Worker → the steps that it has done."""
    return {
        path.name: [int(line) for line in path.read_text().split()]
        for path in site.work.glob("count.*")
    }


def finish(site, job):
    """Let the job end; every step of every worker was done once and counted."""
    (site.work / "enough").touch()
    site.until(lambda: site.job(job)["state"] == "completed", "the job completes")
    done = counts(site).values()
    assert all(steps == list(range(len(steps))) for steps in done)
    assert site.job(job)["samples"] == sum(len(steps) for steps in done)


def running(site, count):
    """A job on ``count`` nodes that does steps."""
    job = site.submit("train.py", COUNT, f"{count}:{count}")
    site.until(
        lambda: len(counts(site)) == count and all(len(s) > 3 for s in counts(site).values()),
        f"the job runs on {count} nodes",
    )
    return job


@pytest.mark.thorough
def test_a_head_that_calls_itself_localhost_and_a_user_who_takes_the_agents_place(boot):
    """The short form: agents of other hosts report, whatever the head's /etc/hosts says."""
    site = boot(2, CALLS_ITSELF)
    for node in site.bed.nodes:
        taken = node.folder / "tmp" / f"malletrain-{os.geteuid()}"
        taken.mkdir(mode=0o777)
        os.chown(taken, SOMEBODY, SOMEBODY)
    site.start()
    job = running(site, 2)
    assert {name.split(".")[2] for name in counts(site)} == {"n1", "n2"}
    assert f"tcp://{HEAD}:" in (site.state / "daemon.json").read_text()
    finish(site, job)


@pytest.mark.sites
def test_a_node_behind_a_firewall_is_cancelled_with_its_words_and_left_alone(boot):
    site = boot(2, daemon=f'advertise = "{FRONT}"', allocation='lease_wait = "30 s"')
    site.bed.drop(site.bed.nodes[0], FRONT)
    site.start()
    job = site.submit("train.py", COUNT, "1:2")
    [event] = site.until(lambda: site.events("lease-unheard"), "the silent lease is cancelled")
    assert event["node"] == "n1"
    assert FRONT in event["sentence"]
    assert "firewall" in event["sentence"]
    site.until(
        lambda: [e for e in site.events("lease-ended") if e["lease"] == event["lease"]],
        "its end is known",
    )
    site.until(lambda: not [j for j in site.bed.jobs() if " n1 " in j], "n1 is free")
    assert {name.split(".")[2] for name in counts(site)} == {"n2"}
    finish(site, job)


@pytest.mark.sites
@pytest.mark.parametrize("trouble", ["cable", "stopped"])
def test_the_daemons_own_trouble_interrupts_nobody(boot, trouble):
    site = boot(3).start()
    job = running(site, 3)
    before, workers = len(site.events("round-formed")), sorted(counts(site))
    head, began = site.bed.head, time.monotonic()
    if trouble == "cable":
        site.bed.link(head, up=False)
    else:
        site.signal(signal.SIGSTOP)
    # as long as in the finding: eight times what an agent alone may be silent
    site.until(lambda: time.monotonic() - began > 40.0, "the daemon heard nobody for long")
    if trouble == "cable":
        site.bed.link(head, up=True)
    else:
        site.signal(signal.SIGCONT)
    site.until(lambda: site.events("daemon-partitioned"), "the daemon knows whose trouble it is")
    steps = {name: len(s) for name, s in counts(site).items()}
    back = time.monotonic()
    site.until(lambda: time.monotonic() - back > 15.0, "every limit has passed")
    assert not [e["sentence"] for e in site.events("node-lost", "node-vanished")], site.events()
    assert len(site.events("round-formed")) == before
    assert sorted(counts(site)) == workers
    assert all(len(counts(site)[name]) > done for name, done in steps.items())
    finish(site, job)


@pytest.mark.sites
def test_one_node_alone_that_is_cut_off_is_lost(boot):
    site = boot(3).start()
    job = site.submit("train.py", COUNT, "2:3")
    site.until(lambda: len(counts(site)) == 3, "the job runs on 3 nodes")
    site.bed.link(site.bed.nodes[2], up=False)
    site.until(lambda: [e for e in site.events("node-lost") if e["node"] == "n3"], "n3 is lost")
    site.until(lambda: len(site.job(job)["nodes"]) == 2, "the job goes on with those left")
    assert not site.events("daemon-partitioned")
