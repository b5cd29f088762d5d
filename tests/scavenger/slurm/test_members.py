"""Which lease a task of an array or a node of a block is."""

import pytest

from scavenger.slurm.job import split_by_lease
from scavenger.slurm.parse import SlurmJob, read_steps
from scavenger.slurm.state import ledger_entry

PREFIX = "malletrain-t-"
NODES = {"l1": "n1", "l2": "n2", "l3": "n3"}


def job(state, number, nodes="", name="l1-3", batch=""):
    return SlurmJob(
        state, number, "me", "low", 1, 5.0, 5.0, 905.0, nodes, "", "", "None", PREFIX + name, batch
    )


def apart(*jobs):
    """Lease → (state, node, the node it asked for, what ends with it)."""
    by_lease = {}
    for one in split_by_lease(jobs, PREFIX, lambda lease: NODES.get(lease, ""), {"me"}):
        lease = one.name[len(PREFIX) :]
        assert lease not in by_lease, "one job for each lease"
        by_lease[lease] = (one.state, one.node_list, one.requested_nodes, one.id)
    return by_lease


def test_a_lease_of_its_own_stays_what_it_is():
    single = job("RUNNING", "9", "n7", "l9")
    assert split_by_lease([single], PREFIX, NODES.get, {"me"}) == [single]


def test_tasks_of_an_array_by_their_nodes_and_those_that_wait_by_what_is_left():
    assert apart(job("PENDING", "7_[0-2]")) == {
        f"l{i}": ("PENDING", "", f"n{i}", "7_[0-2]") for i in (1, 2, 3)
    }
    # Slurm starts them in its own order, on nodes in its own order.
    assert apart(
        job("PENDING", "7_[2]"), job("RUNNING", "7_0", "n3"), job("FAILED", "7_1", "n1")
    ) == {
        "l3": ("RUNNING", "n3", "n3", "7_0"),
        "l1": ("FAILED", "n1", "n1", "7_1"),
        "l2": ("PENDING", "", "n2", "7_[2]"),
    }
    assert apart(job("CANCELLED", "7_2"), job("RUNNING", "7_0", "n3")).keys() == {"l3"}


def test_nodes_of_a_block():
    assert apart(job("PENDING", "8")) == {f"l{i}": ("PENDING", "", f"n{i}", "8") for i in (1, 2, 3)}
    # It began with two of them, those that were free.
    running = job("RUNNING", "8", "n[1,3]", batch="n1")
    assert apart(running) == {
        "l1": ("RUNNING", "n1", "n1", "8"),
        "l3": ("RUNNING", "n3", "n3", "8"),
    }
    parts = {
        one.part.node: one.part for one in split_by_lease([running], PREFIX, NODES.get, {"me"})
    }
    assert [(p.id, p.first, p.removable) for p in parts.values()] == [
        ("8/n1", True, True),
        ("8/n3", False, True),
    ]


def test_slots_of_a_whole_host():
    slots = {"l1": "c1/gpu.0", "l3": "c1/gpu.2"}  # an earlier daemon has forgotten l2
    for state, nodes, placed in (("PENDING", "", ""), ("RUNNING", "c1", None)):
        parts = split_by_lease(
            [job(state, "8", nodes, batch="c1")], PREFIX, lambda lease: slots.get(lease, ""), {"me"}
        )
        assert {p.name[len(PREFIX) :]: p.requested_nodes for p in parts} == slots
        assert [p.node_list for p in parts] == [slots[k] if placed is None else "" for k in slots]
        running = state == "RUNNING"
        assert [(p.part.id, p.part.first, p.part.removable) for p in parts] == [
            ("8/c1/gpu.0", False, running),
            ("8/c1/gpu.2", False, running),
        ]


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_a_node_that_no_daemon_knows_is_nobodys_lease_and_not_kept(state):
    parts = split_by_lease([job(state, "8", "n[2,5]", batch="n5")], PREFIX, NODES.get, {"me"})
    jobs = {
        one.requested_nodes: ledger_entry(one.name[len(PREFIX) :], one, 10.0, 5.0) for one in parts
    }
    assert (jobs["n2"].lease.id, jobs["n2"].lost) == ("l2", "")
    assert (jobs["n5"].lease.id, jobs["n5"].lost) == ("l1-3@n5", "nobody asked for it")


def test_what_a_part_is_called_and_what_ends_with_it():
    [waiting, *_] = split_by_lease([job("PENDING", "7_[0-2]")], PREFIX, NODES.get, {"me"})
    made = ledger_entry("l1", waiting, 10.0, 5.0)
    assert (made.lease.scheduler_id, made.id) == ("7/n1", "7_[0-2]")
    [node, _] = split_by_lease(
        [job("RUNNING", "8", "n[1,3]", batch="n1")], PREFIX, NODES.get, {"me"}
    )
    made = ledger_entry("l1", node, 10.0, 5.0)
    assert (made.lease.scheduler_id, made.id) == ("8/n1", "8/n1"), "no command ends the whole"


def test_a_job_of_somebody_who_has_no_lease_is_not_taken_apart():
    fakes = [job("RUNNING", "8", "n[1-3]")._replace(user="eve"), job("PENDING", "9")]
    assert split_by_lease(fakes, PREFIX, NODES.get, {"me"})[0] is fakes[0]
    assert split_by_lease(fakes, PREFIX, NODES.get, {"ann"}) == fakes


def test_steps():
    text = "8.0|n2\n8.1|n3\n8.batch|n1\n8.extern|n[1-3]\n"
    assert read_steps(text) == {("8", "n2"): "8.0", ("8", "n3"): "8.1"}
    assert read_steps("") == {}
    text = "8.0|c1|c1/gpu.0\n8.1|c1|c1/gpu.1\n9.0|c2|sh\n8.batch|c1|batch\n"
    assert read_steps(text) == {
        ("8", "c1/gpu.0"): "8.0",
        ("8", "c1/gpu.1"): "8.1",
        ("9", "c2"): "9.0",
    }


@pytest.mark.parametrize(
    ("state", "end", "lost"),
    [
        ("CONFIGURING", 14.0, "preempted while its node was set up"),
        ("CONFIGURING", 5000.0, ""),
        ("CONFIGURING", None, ""),
        ("PENDING", None, ""),
        ("RUNNING", 14.0, ""),
    ],
)
def test_a_lease_that_is_preempted_before_its_command_begins_is_lost(state, end, lost):
    """When its node is set up, Slurm gives it its old end and does not preempt it again."""
    lease_job = ledger_entry("l1", job(state, "8", "n1")._replace(end=end), 10.0, 5.0)
    assert lease_job.lost == lost
