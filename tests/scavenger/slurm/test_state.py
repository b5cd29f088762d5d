import pytest

from scavenger.batch.lease_ledger import own_jobs
from scavenger.interface import LeaseState, SchedulerError
from scavenger.slurm.parse import SlurmReservation, read_jobs, read_nodes
from scavenger.slurm.state import ENDED_STATES, PENDING_STATES, lease_of, node_facts
from tests.scavenger.slurm import slurm_world as world

PREFIX = "malletrain-t-"
NOW = 10_000.0


def facts(states, queue="", reservations=(), idle_since=None):
    jobs = read_jobs(queue, "MARK", PREFIX)
    return node_facts(
        read_nodes(world.nodes(states), "MARK"),
        jobs,
        reservations,
        ours(queue),
        idle_since or {},
        NOW,
    )


def ours(queue):
    return own_jobs(
        read_jobs(queue, "MARK", PREFIX).ours,
        PREFIX,
        lambda lease: "me",
        PENDING_STATES,
        ENDED_STATES,
    )


@pytest.mark.parametrize(
    ("state", "idle", "words"),
    [
        ("idle", True, ""),
        ("idle*", True, "does not respond"),
        ("idle~", True, "powered down"),
        ("idle#", True, "powering up"),
        ("idle$", True, "maintenance"),
        ("idle@", True, "rebooted"),
        ("allocated", False, ""),
        ("mixed", False, ""),
        ("completing", False, ""),
        ("drained", False, "it is drained"),
        ("draining", False, "it is draining"),
        ("down*", False, "it is down"),
        ("powered_down", False, "it is powered_down"),
        ("powering_down", False, "it is powering_down"),
        ("powering_up", False, "it is powering_up"),
        ("idle%", True, "powering down"),
        ("idle!", True, "about to be powered down"),
        ("planned~", True, "powered down"),
        ("idle~-", True, "powered down"),
        ("idle*#", True, "does not respond"),
        ("mixed#", False, "powering up"),
        ("allocated#", False, "powering up"),
        ("allocated!", False, "about to be powered down"),
        ("unknown", False, "it is unknown"),
    ],
)
def test_states_of_nodes(state, idle, words):
    node = facts({state: "n1"})["n1"]
    assert node.idle is idle
    assert words in node.trouble
    assert bool(node.trouble) == bool(words)
    assert bool(node.drained) == (state in ("idle@", "idle!", "allocated!", "drained", "draining"))


def test_planned_nodes_by_state_by_mark_and_by_the_queue():
    queue = world.job("PENDING", 1, "big", start=NOW + 500, planned="n[3-4]")
    queue += world.job("PENDING", 2, "later", start=NOW + 900, planned="n4")
    made = facts({"planned": "n1", "idle-": "n2", "idle": "n[3-4]", "allocated": "n5"}, queue)
    assert [made[f"n{i}"].planned for i in (1, 2, 3, 5)] == [True, True, False, False]
    assert made["n1"].planned_at is None
    assert made["n4"].planned_at == made["n4"].free_until == NOW + 500
    assert made["n5"].planned_at is None


def test_reservations_now_and_later():
    reservations = [
        SlurmReservation("now", NOW - 10, NOW + 10, "n1", True),
        SlurmReservation("past", NOW - 20, NOW - 10, "n2", False),
        SlurmReservation("soon", NOW + 100, NOW + 200, "n[2-3]", False),
        SlurmReservation("later", NOW + 300, NOW + 400, "n3", False),
    ]
    made = facts({"idle": "n[1-3]", "reserved": "n4", "maint": "n5"}, "", reservations)
    assert made["n1"].reserved == "maintenance reservation now has it"
    assert made["n2"].reserved_from == made["n3"].reserved_from == NOW + 100
    assert made["n4"].reserved
    assert made["n5"].reserved
    assert made["n3"].free_until == NOW + 100


def test_idle_times_go_on_and_begin_anew():
    made = facts({"idle": "n[1-2]", "allocated": "n3"}, idle_since={"n1": NOW - 50, "n3": NOW - 50})
    assert (made["n1"].idle_since, made["n2"].idle_since, made["n3"].idle_since) == (
        NOW - 50,
        NOW,
        None,
    )


def test_our_leases_hold_the_nodes_they_run_on_and_wait_for():
    queue = (
        world.job("RUNNING", 1, f"{PREFIX}l1", nodes="n1")
        + world.job("PENDING", 2, f"{PREFIX}l2", requested_nodes="n2")
        + world.job("COMPLETED", 3, f"{PREFIX}l3", nodes="n3")
        + world.job("RUNNING", 4, f"{PREFIX}l4", nodes="n4", user="somebody")
    )
    made = facts({"allocated": "n[1,4]", "idle": "n[2-3]"}, queue)
    assert [made[f"n{i}"].lease for i in range(1, 5)] == ["l1", "l2", "", ""]


def lease(state, **fields):
    [job] = read_jobs(world.job(state, 7, f"{PREFIX}l1", **fields), "MARK", PREFIX).ours
    return lease_of("l1", job, NOW, 10.0)


def test_states_of_leases():
    assert lease("PENDING", reason="Resources").state is LeaseState.PENDING
    running = lease("RUNNING", nodes="n1", end=NOW + 3600)
    assert (running.state, running.node, running.gone_at, running.scheduler_id) == (
        LeaseState.RUNNING,
        "n1",
        None,
        "7",
    )
    assert running.ends_by == NOW + 3600
    ending = lease("RUNNING", nodes="n1", end=NOW + 8)
    assert (ending.gone_at, ending.ends_by) == (NOW + 8, None), "preempted, or at its limit"
    assert lease("COMPLETING", nodes="n1", end=NOW).gone_at == NOW
    for state in (
        "PREEMPTED",
        "COMPLETED",
        "FAILED",
        "CANCELLED",
        "TIMEOUT",
        "NODE_FAIL",
        "DEADLINE",
    ):
        ended = lease(state, nodes="n1")
        assert ended.state is LeaseState.ENDED
        assert ended.reason


def test_of_two_jobs_of_one_lease_the_livelier_counts():
    queue = (
        world.job("RUNNING", 2, f"{PREFIX}l1")
        + world.job("CANCELLED", 1, f"{PREFIX}l1")
        + world.job("PENDING", 3, f"{PREFIX}l1")
    )
    assert ours(queue)["l1"].id == "2"


def test_damaged_lists_of_nodes_are_sentences():
    with pytest.raises(SchedulerError, match="reservation cannot be understood"):
        facts({"idle": "n1"}, "", [SlurmReservation("r", 0.0, NOW + 1, "n[1-", False)])
    with pytest.raises(SchedulerError, match="squeue cannot be understood"):
        facts({"idle": "n1"}, world.job("PENDING", 1, "x", start=NOW, planned="n[1-"))


def test_the_node_of_a_suspended_job_of_others_is_in_use_although_slurm_calls_it_idle():
    """slurmctld makes it idle (job_mgr.c, _suspend_job_nodes); the job keeps its memory there."""
    queue = world.job("SUSPENDED", 7, "main", nodes="n[1-2]")
    queue += world.job("SUSPENDED", 8, f"{PREFIX}l1", nodes="n3")
    table = facts({"idle": "n[1-4]"}, queue)
    assert {name: node.trouble for name, node in table.items()} == {
        "n1": "job 7 is suspended on it",
        "n2": "job 7 is suspended on it",
        "n3": "",
        "n4": "",
    }
