"""Leases of the embedded cluster with real processes: well-behaved, stubborn and forking ones."""

import json
import os
import signal

import pytest

from scavenger.embedded import processes
from scavenger.embedded.lease import notice_given
from scavenger.embedded.scavenger import LocalScavenger
from scavenger.interface import LeaseRequest, LeaseState, SchedulerError
from tests.scavenger.embedded.leases import (
    PARENT,
    PY,
    SLEEP,
    STUBBORN,
    lease_of,
    take,
    wait_clean,
    wait_ready,
)
from tests.waiting import NEVER_S, until


def test_all_nodes_are_gaps_without_a_trace(cluster):
    polled = cluster(3).scavenger().poll()
    assert [g.node for g in polled.gaps] == ["n1", "n2", "n3"]
    assert (polled.total_nodes, polled.idle_nodes, polled.leases) == (3, 3, ())


def test_a_lease_runs_its_command_with_the_environment_asked_for(cluster):
    scavenger = cluster().scavenger()
    show = (
        "import os; print(*(os.environ[k] for k in ('MALLETRAIN_NODE', 'MALLETRAIN_LEASE', "
        "'X')), os.getcwd(), sep='|')"
    )
    lease = take(
        scavenger, "a-1", "n2", (PY, "-S", "-c", show), env={"X": "spaces and $(nothing)\n'"}
    )
    assert (lease.state, lease.node) == (LeaseState.RUNNING, "n2")
    folder = scavenger.layout.lease_directory("a-1")
    assert wait_clean(scavenger, "a-1")["exit_status"] == 0
    assert (folder / "output.log").read_text() == f"n2|a-1|spaces and $(nothing)\n'|{folder}\n"
    assert "n2" in [g.node for g in scavenger.poll().gaps]


def test_a_lease_is_in_the_next_poll_and_its_node_no_gap(cluster):
    scavenger = cluster().scavenger()
    lease = take(scavenger, "a", "n1")
    polled = scavenger.poll()
    assert polled.leases == (lease,)
    assert [g.node for g in polled.gaps] == ["n2"]
    assert polled.idle_nodes == 2


def test_a_refused_lease_is_ended_with_the_reason_and_fails_no_other(cluster):
    scavenger = cluster().scavenger()
    take(scavenger, "a", "n1")
    cases = [
        (LeaseRequest("b", "n1", SLEEP), "Node n1 is leased, not idle."),
        (LeaseRequest("b", "n9", SLEEP), "There is no node 'n9' in this cluster."),
        (LeaseRequest("b", "n2", ()), "The command must be a list of at least one string."),
        (
            LeaseRequest("b", "n2", SLEEP, duration_s=-1.0),
            "The time limit must be a positive number of seconds; got -1.0.",
        ),
        (
            LeaseRequest("../b", "n2", SLEEP),
            "The lease id '../b' is not made of 1-100 letters, digits, '.', '_' and '-'.",
        ),
        (
            LeaseRequest("", "n2", SLEEP),
            "The lease id '' is not made of 1-100 letters, digits, '.', '_' and '-'.",
        ),
    ]
    *refused, accepted = scavenger.take(
        [*(request for request, _ in cases), LeaseRequest("c", "n2", SLEEP)]
    )
    assert [(x.id, x.state, x.reason) for x in refused] == [
        (r.id, LeaseState.ENDED, reason) for r, reason in cases
    ]
    assert accepted.state is LeaseState.RUNNING


def test_asking_twice_for_one_lease_starts_one_process(cluster):
    scavenger = cluster().scavenger()
    first, second = take(scavenger, "a", "n1"), take(scavenger, "a", "n1")
    assert first == second
    assert scavenger.totals()["leases"] == 1


def test_a_command_that_cannot_be_run_ends_its_lease_and_says_where_to_look(cluster):
    scavenger = cluster().scavenger()
    take(scavenger, "a", "n1", ("/no/such/command",))
    assert wait_clean(scavenger, "a")["exit_status"] == 127
    assert (
        lease_of(scavenger, "a").reason
        == "its command failed with exit status 127; see leases/a/output.log"
    )
    assert "/no/such/command" in (scavenger.layout.lease_directory("a") / "output.log").read_text()


def test_giving_back_frees_the_node_and_twice_is_no_error(cluster):
    scavenger = cluster(grace_s=NEVER_S).scavenger()
    lease = take(scavenger, "a", "n1")
    scavenger.give_back([lease])
    assert wait_clean(scavenger, "a")["exit_status"] == -signal.SIGTERM
    scavenger.give_back([lease])
    assert lease_of(scavenger, "a").reason == "given back"
    until(lambda: len(scavenger.poll().gaps) == 2, "the node to be a gap again")


def test_what_ignores_sigterm_is_killed_after_the_grace_time(cluster):
    scavenger = cluster(grace_s=0.4).scavenger()
    lease = take(scavenger, "a", "n1", STUBBORN)
    wait_ready(scavenger, "a")
    scavenger.give_back([lease])
    record = wait_clean(scavenger, "a")
    assert (record["exit_status"], record["killed_after_grace"]) == (-signal.SIGKILL, 1)
    assert record["ended"] >= record["gone_at"]


def test_what_is_given_back_runs_until_it_has_left(cluster):
    running = cluster(grace_s=NEVER_S)
    scavenger = running.scavenger()
    lease = take(scavenger, "a", "n1", STUBBORN)
    wait_ready(scavenger, "a")
    assert lease_of(scavenger, "a").gone_at is None
    scavenger.give_back([lease])
    leaving = lease_of(scavenger, "a")
    assert leaving.state is LeaseState.RUNNING
    assert leaving.gone_at is not None
    running.stop(0.0)


def test_a_time_limit_ends_a_lease(cluster):
    scavenger = cluster().scavenger()
    take(scavenger, "a", "n1", duration_s=0.3)
    assert wait_clean(scavenger, "a")["reason"] == "its time limit was reached"


def test_processes_left_behind_are_killed_and_counted(cluster):
    scavenger = cluster(grace_s=NEVER_S).scavenger()
    lease = take(scavenger, "a", "n1", PARENT)
    children = [int(pid) for pid in wait_ready(scavenger, "a").split()]
    scavenger.give_back([lease])
    record = wait_clean(scavenger, "a")
    assert (record["exit_status"], record["orphans"], record["killed_after_grace"]) == (0, 2, 0)
    assert not any(processes.alive(pid) for pid in children)
    assert scavenger.totals()["orphans"] == 2


MALFORMED = [
    "",
    "{",
    "[]",
    "\udcff",
    '{"format": 99, "kind": "take", "requests": []}',
    '{"format": 1, "kind": "dance"}',
    '{"format": 1, "kind": "take"}',
    '{"format": 1, "kind": "take", "requests": ["x", 3, {"id": "q", "node": "n1", "argv": '
    '"sleep"}]}',
]


def test_malformed_requests_are_answered_and_hurt_nobody(cluster):
    scavenger = cluster().scavenger()
    for k, text in enumerate(MALFORMED):
        scavenger.layout.spool.joinpath(f".bad{k}").write_bytes(
            text.encode(errors="surrogateescape")
        )
        scavenger.layout.spool.joinpath(f".bad{k}").rename(scavenger.layout.spool / f"bad{k}.json")
    for k in range(len(MALFORMED)):
        answer = scavenger.layout.answers / f"bad{k}.json"
        until(answer.exists, f"the answer to {MALFORMED[k]}")
        reply = json.loads(answer.read_text())
        assert reply["ok"] is False or all(
            x["state"] == "ended" and x["reason"] for x in reply["leases"]
        )
    assert list(scavenger.layout.spool.iterdir()) == []
    assert take(scavenger, "a", "n1").state is LeaseState.RUNNING


def test_check_says_what_works(cluster):
    verdicts = cluster(grace_s=0.5).scavenger().check()
    assert [ok for ok, _ in verdicts] == [True, True, False]
    assert "longer --grace" in verdicts[-1][1]


def test_a_silent_cluster_is_an_error_and_the_request_is_withdrawn(cluster):
    running = cluster()
    scavenger = LocalScavenger(running.directory, timeout_s=0.3)
    os.kill(running.pid, signal.SIGSTOP)
    try:
        with pytest.raises(SchedulerError, match="no answer within"):
            take(scavenger, "a", "n1")
        assert list(scavenger.layout.spool.iterdir()) == []
    finally:
        os.kill(running.pid, signal.SIGCONT)
    assert scavenger.poll().leases == ()


def test_a_poll_of_a_cluster_that_stands_still_fails(cluster):
    """As that of a batch scheduler does: the daemon then counts the polls that it missed."""
    running = cluster()
    scavenger = LocalScavenger(running.directory, silent_s=0.0)
    os.kill(running.pid, signal.SIGSTOP)
    try:
        with pytest.raises(SchedulerError, match=r"has not written its state for \d+ s: it stands"):
            scavenger.poll()
    finally:
        os.kill(running.pid, signal.SIGCONT)
    assert running.scavenger().poll().total_nodes == 2


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 0), (0.25, 10), (0.75, 30), (1.0, 40)])
def test_the_fraction_with_notice_is_exact_and_repeatable(fraction, expected):
    for seed in range(5):
        notices = [notice_given(k, fraction, seed) for k in range(40)]
        assert sum(notices) == expected
        assert notices == [notice_given(k, fraction, seed) for k in range(40)]
