"""Leases that share a job of a real Slurm: taken together, given back one by one, preempted,
adopted.
"""

from __future__ import annotations

import sys

import psutil
import pytest

from scavenger.batch.groups import leases_in
from scavenger.interface import LeaseRequest, LeaseState
from tests.selection import every_change
from tests.slurm.test_leases import LEAVE, gaps, scavenger, states

SHAPES = ("array", "block")
PREFIX = "malletrain-t-"


def shared(slurm, shape, **settings):
    return scavenger(slurm, shape=shape, **settings)


def make_requests(root, *nodes):
    """Requests for leases l1, l2, … on these nodes, and the file that each writes at its signal."""
    marks = {node: root / f"told-{node}" for node in nodes}
    requests = [
        LeaseRequest(f"l{i}", node, (sys.executable, "-c", LEAVE, str(marks[node])), {"A": node})
        for i, node in enumerate(nodes, 1)
    ]
    return requests, marks


def ready(marks):
    return [node for node, path in marks.items() if path.with_name(path.name + ".ready").exists()]


def take(slurm, one, requests, marks):
    one.poll()
    leases = one.take(requests)
    assert {lease.state for lease in leases} == {LeaseState.PENDING}, leases
    slurm.until(lambda: len(ready(marks)) == len(marks), "an agent runs on each node")
    return leases


def here(one):
    """Node of each running lease."""
    return {
        lease.id: lease.node for lease in one.poll().leases if lease.state is LeaseState.RUNNING
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_one_submission_for_several_leases_each_on_its_own_node(cluster, root, shape):
    slurm = cluster(5, grace=20, kill_wait=600)  # a lease leaves at its signal
    one = shared(slurm, shape)
    assert all(works for works, _ in one.check()), one.check()
    requests, marks = make_requests(root, "n2", "n5", "n3")
    take(slurm, one, requests, marks)
    assert {leases_in(name[len(PREFIX) :]) for _, _, name in slurm.leases().values()} == {
        ("l1", "l2", "l3")
    }
    assert here(one) == {"l1": "n2", "l2": "n5", "l3": "n3"}
    assert gaps(one) == ["n1", "n4"]
    # One of them is given back: the others do not notice.
    one.give_back([lease for lease in one.poll().leases if lease.id == "l2"])
    slurm.until(lambda: "n5" in gaps(one), "its node is a gap again")
    assert here(one) == {"l1": "n2", "l3": "n3"}
    assert not marks["n2"].exists()
    assert not marks["n3"].exists()
    # A daemon that comes back after kill -9 knows ids, owners and nodes, and nothing else.
    after = shared(slurm, shape)
    after.know({"l1": "", "l3": ""}, {"l1": "n2", "l3": "n3"})
    assert here(after) == {"l1": "n2", "l3": "n3"}
    slurm.until(lambda: gaps(after) == ["n1", "n4", "n5"], "what is free is known to be")
    after.give_back(after.poll().leases)
    slurm.until(lambda: not slurm.leases(), "nothing is left")
    assert marks["n2"].exists()
    assert marks["n3"].exists()


def test_the_first_node_of_a_block_goes_last(cluster, root):
    slurm = cluster(3, grace=20)
    one = shared(slurm, "block")
    requests, marks = make_requests(root, "n1", "n2", "n3")
    take(slurm, one, requests, marks)
    one.give_back([lease for lease in one.poll().leases if lease.id == "l1"])
    assert here(one) == {"l2": "n2", "l3": "n3"}
    assert gaps(one) == []
    # Neither this daemon nor the next one takes it for a lease, and it ends with the last one.
    after = shared(slurm, "block")
    after.know({"l2": "", "l3": ""}, {"l2": "n2", "l3": "n3"})
    assert here(after) == {"l2": "n2", "l3": "n3"}
    after.give_back([lease for lease in after.poll().leases if lease.id == "l2"])
    slurm.until(lambda: gaps(after) == ["n2"], "the second node is a gap")
    assert not marks["n3"].exists()
    after.give_back([lease for lease in after.poll().leases if lease.id == "l3"])
    slurm.until(lambda: gaps(after) == ["n1", "n2", "n3"], "and then all of them")
    assert not slurm.leases()


def test_a_block_gives_back_the_node_whose_agent_was_killed(cluster, root, monkeypatch):
    monkeypatch.setattr("scavenger.slurm.scavenger.QUERY_INTERVAL_S", 0.0)
    slurm = cluster(3, grace=20)
    one = shared(slurm, "block")
    requests, marks = make_requests(root, "n1", "n2", "n3")
    take(slurm, one, requests, marks)
    assert here(one) == {"l1": "n1", "l2": "n2", "l3": "n3"}
    [agent] = [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] == list(requests[1].argv)
    ]
    agent.kill()
    slurm.until(lambda: here(one) == {"l1": "n1", "l3": "n3"}, "its lease is over")
    slurm.until(lambda: gaps(one) == ["n2"], "its node is a gap again")
    assert here(one) == {"l1": "n1", "l3": "n3"}
    assert not marks["n1"].exists()
    assert not marks["n3"].exists()
    one.give_back(one.poll().leases)
    slurm.until(lambda: not slurm.leases(), "nothing is left")


@pytest.mark.parametrize(("shape", "go"), [("array", ["n2"]), ("block", ["n2", "n3", "n4"])])
def test_what_a_preemption_takes(cluster, root, shape, go):
    # A lease that ignored its signal would keep its node for an hour.
    slurm = cluster(4, grace=3600)
    one = shared(slurm, shape)
    requests, marks = make_requests(root, "n2", "n3", "n4")
    take(slurm, one, requests, marks)
    assert states(one) == dict.fromkeys(("l1", "l2", "l3"), LeaseState.RUNNING)
    main = slurm.submit("sleep 3600", "--nodelist=n2", "--exclusive", "--time=60")
    slurm.until(lambda: slurm.jobs()[main][0] == "RUNNING", "the main job runs")
    slurm.until(lambda: len(here(one)) == 3 - len(go), "the leases are over")
    assert sorted(node for node, path in marks.items() if path.exists()) == go
    slurm.run("scancel", main)
    one.give_back(one.poll().leases)
    slurm.until(lambda: not slurm.leases(), "nothing is left")


@pytest.mark.parametrize("shape", every_change(SHAPES, "block"))
def test_one_of_them_is_asked_to_leave(cluster, root, shape):
    slurm = cluster(3, grace=3600)
    one = shared(slurm, shape)
    requests, marks = make_requests(root, "n1", "n2", "n3")
    take(slurm, one, requests, marks)
    slurm.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=fan")
    slurm.until(lambda: set(here(one)) == {"l1", "l3"}, "the lease on n2 has left")
    assert [node for node, path in marks.items() if path.exists()] == ["n2"]
    slurm.until(lambda: slurm.states()[1] == "drained", "nobody is on n2 any more")
    one.give_back(one.poll().leases)
    slurm.until(lambda: not slurm.leases(), "nothing is left")


@pytest.mark.parametrize("shape", every_change(SHAPES, "block"))
def test_what_cannot_be_had_at_once_keeps_nothing_waiting(cluster, root, shape):
    slurm = cluster(3, grace=20)
    one = shared(slurm, shape, start_within_s=0.5)
    one.poll()
    requests, marks = make_requests(root, "n1", "n2", "n3")
    view = one.read_state()
    slurm.submit("sleep 3600", "--nodelist=n2", "--exclusive", "--time=60")
    slurm.until(lambda: slurm.states()[1] == "allocated", "somebody else is on n2 by now")
    one.read_state = lambda: view
    one.take(requests)
    del one.read_state
    slurm.until(lambda: len(ready(marks)) == 2, "the other two run")
    slurm.until(
        lambda: (
            all(state != "PENDING" for state, _, _ in slurm.leases().values())
            and set(here(one)) == {"l1", "l3"}
        ),
        "what waits is withdrawn",
    )
    one.give_back(one.poll().leases)
    slurm.until(lambda: not slurm.leases(), "nothing is left")


@pytest.mark.parametrize("shape", SHAPES)
def test_leases_whose_output_is_kept_run_until_they_are_given_back(cluster, root, shape):
    """As with a daemon, which keeps it unless the site says otherwise."""
    slurm = cluster(2)
    outputs = root / "outputs"
    outputs.mkdir()
    one = shared(slurm, shape, output_dir=outputs)
    one.poll()
    command = ("/bin/sh", "-c", "echo this is $MALLETRAIN_NODE; sleep 600")
    leases = one.take([LeaseRequest(f"l{i}", f"n{i}", command) for i in (1, 2)])

    def printed():
        return {path.name: path.read_text() for path in outputs.iterdir()}

    slurm.until(
        lambda: all(f"this is n{i}" in printed().get(f"l{i}.out", "") for i in (1, 2)),
        "both leases print",
    )
    assert here(one) == {"l1": "n1", "l2": "n2"}
    one.give_back(leases)

    def gone():
        one.poll()
        return not slurm.leases()

    slurm.until(gone, "the leases end")
