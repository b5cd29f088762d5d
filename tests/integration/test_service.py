"""Services on real processes: members come and go, nobody is restarted for it, and kills are
survived.
"""

from __future__ import annotations

import json
import os
import signal

import pytest

from malletrain.submission.options import ScriptOptions
from malletrain.submission.spec import build
from tests.integration.embedded import site

SERVICE = """
import json, os, time
from malletrain import membership

group = membership.join(f"{membership.host()}:{os.getpid()}")
print("key of", len(membership.job_key()), "bytes", flush=True)
assert "torch" not in __import__("sys").modules
with open(f"news-{group.me.node}-{os.getpid()}", "w", buffering=1) as news:
    for change in group.changes():
        print(json.dumps([change.kind, change.member.node, change.member.address, len(group.members)]), file=news)
        if change.kind == "leaving" and change.member == group.me:
            if os.path.exists("deaf"):
                continue
            print(json.dumps(["drained", group.me.node, f"{change.member.seconds_left:.1f}", 0]), file=news)
            group.report_drained()
"""  # noqa: E501
"""Writes down every change it receives, one file a process."""


def news(site):
    """Process (node, pid) → the messages it received, in order."""
    by_process = {}
    for path in site.work.glob("news-*"):
        _, node, pid = path.name.rsplit("-", 2)
        by_process[node, int(pid)] = [
            json.loads(line) for line in path.read_text().splitlines() if line
        ]
    return by_process


def submit(site, nodes="1:3"):
    script = site.script("service.py", SERVICE)
    value = site.root / "value.csv"
    value.write_text("nodes,value\n1,10\n2,25\n3,30\n")
    spec = build(
        str(script),
        (),
        ScriptOptions(
            name="service", nodes=nodes, service=True, value=value, workdir=str(site.work)
        ),
    )
    with site.client() as client:
        return client.submit(spec).id


def members(site, job):
    with site.client() as client:
        return {m.node: m.address for m in client.members(job).members}


def up(site, job, count):
    """Wait until ``count`` members are there; return their addresses by node."""
    site.until(lambda: len(members(site, job)) == count, f"{count} members")
    return members(site, job)


def heard(site, kind, node, by):
    """Whether process ``by`` has heard of ``kind`` about ``node``."""
    return any(line[:2] == [kind, node] for line in news(site).get(by, []))


@pytest.mark.check
def test_members_hear_of_a_loss_with_and_without_notice_and_live_on(shared):
    job = submit(shared)
    first = up(shared, job, 3)
    pids = {node: int(address.rpartition(":")[2]) for node, address in first.items()}
    a, b, c = sorted(first)
    shared.until(
        lambda: all(len(lines) >= 3 for lines in news(shared).values()) and len(news(shared)) == 3,
        "all heard of all",
    )

    agents = shared.agents()
    agents[c].send_signal(
        signal.SIGTERM
    )  # The main scheduler takes it back: the service gets notice, drains and goes.
    shared.until(
        lambda: heard(shared, "leaving", c, (a, pids[a])), "the others hear that it leaves"
    )
    shared.until(lambda: heard(shared, "drained", c, (c, pids[c])), "it drains itself")
    shared.until(lambda: heard(shared, "left", c, (a, pids[a])), "it has left")

    shared.agents()[b].kill()  # without notice
    shared.until(lambda: heard(shared, "left", b, (a, pids[a])), "the loss is told")
    up(shared, job, 3)  # both come back when their nodes do
    assert members(shared, job)[a] == first[a], "the survivor was restarted"
    with shared.client() as client:
        assert client.job(job).job.tries == 0
        assert len(client.members(job).key) == 64
        assert "key of 32 bytes" in client.logs(job, stream="service").text


@pytest.mark.thorough
def test_a_service_outlives_the_daemon_and_a_killed_process_comes_back(shared):
    job = submit(shared)
    first = up(shared, job, 3)
    shared.kill_daemon()
    shared.start_daemon()
    shared.until(lambda: members(shared, job) == first, "the same processes are members again")

    node, address = sorted(first.items())[1]
    os.kill(int(address.rpartition(":")[2]), signal.SIGKILL)
    shared.until(lambda: members(shared, job).get(node, address) != address, "it was started again")
    after = up(shared, job, 3)
    assert {n: a for n, a in after.items() if n != node} == {
        n: a for n, a in first.items() if n != node
    }
    assert shared.job(job).tries == 1
    with shared.client() as client:
        client.cancel([job])
    shared.until_state(job, "cancelled")


@pytest.mark.thorough
def test_a_node_that_leaves_while_there_is_no_daemon_still_hands_over(shared):
    job = submit(shared)
    first = up(shared, job, 3)
    node = sorted(first)[2]
    pid = int(first[node].rpartition(":")[2])
    shared.until(lambda: heard(shared, "joined", node, (node, pid)), "it knows that it is a member")
    shared.kill_daemon()
    shared.agents()[node].send_signal(signal.SIGTERM)
    shared.until(
        lambda: heard(shared, "drained", node, (node, pid)), "it alone hears of it, and drains"
    )
    shared.until(lambda: node not in shared.agents(), "its agent has gone")
    shared.start_daemon()
    shared.until(
        lambda: members(shared, job).get(node) != first[node], "the daemon knows that it has gone"
    )
    others = {n: address for n, address in members(shared, job).items() if n != node}
    assert others.items() <= first.items(), "the others go on"


@pytest.mark.thorough
def test_a_leaver_that_says_nothing_is_released_within_its_notice(tmp_path):
    with site(tmp_path, nodes=3, grace_s=3.0) as made:
        deaf(made)


def deaf(shared):
    (shared.work / "deaf").touch()
    job = submit(shared, nodes="3:3")
    first = up(shared, job, 3)
    node = sorted(first)[0]
    shared.agents()[node].send_signal(signal.SIGTERM)
    shared.until(
        lambda: node not in shared.agents() or members(shared, job).get(node) != first[node],
        "it has gone",
    )
    assert not heard(shared, "drained", node, (node, int(first[node].rpartition(":")[2])))
    up(shared, job, 3)
