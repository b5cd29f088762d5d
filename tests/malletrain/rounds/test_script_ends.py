"""A script that has ended with code 0 is done: what changes of nodes, losses, failures and a
restart of the daemon make of it.
"""

from __future__ import annotations

import pytest

from malletrain.protocol.messages import Assignment
from malletrain.protocol.phases import AssignmentPhase
from malletrain.rounds.interface import (
    Broke,
    NodesRejected,
    RoundStage,
    SaveRound,
    SendAssign,
    SendDrain,
    SendRelease,
    SendRound,
    WorkersDone,
    WorkersRunning,
)
from malletrain.rounds.restart import RestartRounds
from tests.malletrain.rounds.live_world import Live
from tests.malletrain.rounds.rounds_tables import CLOSED, SETTINGS, STORE, fails, running, says

FINISHING = RoundStage.FINISHING


def done(r, now, *nodes, generation=1, size=2):
    """Every worker on ``nodes`` ends with code 0; return the actions that follow."""
    assignment = Assignment("j", AssignmentPhase.SUCCEEDED, generation, size=size)
    return [action for node in nodes for action in r.phase(node, assignment, now)]


CHANGES = {
    "shrink": ("a",),
    "without rank 0": ("b",),
    "grow": ("a", "b", "c"),
    "all others": ("c", "d"),
    "suspend": (),
}


@pytest.mark.parametrize("nodes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("how", ["finishing", "succeeded"])
def test_a_planned_change_waits_for_the_end_and_is_dropped(nodes, how):
    r = running("a", "b")
    says(r, 110.0, how, "b")
    assert r.finishing
    assert r.move(nodes, 111.0) == []
    assert (r.stage, r.next_wakeup()) == (FINISHING, None)
    assert r.drained("a", 1, 112.0) == []
    assert done(r, 113.0, "a") + done(r, 114.0, "b") == [WorkersDone()]


@pytest.mark.parametrize("how", ["finishing", "succeeded"])
def test_the_loss_of_a_leaver_during_the_end_restarts_the_others(how):
    """The controller makes no plan for it: the newest one does without that node."""
    r = running("a", "b")
    says(r, 110.0, how, "a")
    assert r.move(("a",), 111.0) == []
    assert r.gone("b", 112.0) == []
    due = 112.0 + SETTINGS.failure_grace_s
    assert (r.stage, r.next_wakeup()) == (FINISHING, due)
    assert r.tick(due)[0] == SaveRound(2, ("a",))


@pytest.mark.parametrize("how", ["finishing", "succeeded"])
def test_a_change_that_has_begun_waits_too(how):
    r = running("a", "b")
    assert r.move(("a",), 110.0) == [SendDrain("a", 1, 1)]
    assert says(r, 111.0, how, "b") == [SendDrain("a", 1, 0)]
    assert r.drained("a", 1, 112.0) == []
    assert (r.stage, r.next_wakeup()) == (FINISHING, None)
    assert done(r, 113.0, "a", "b") == [WorkersDone()]


def test_joiners_that_come_up_meanwhile_disturb_nobody():
    r = running("a", "b")
    assert r.move(("a", "b", "c"), 110.0) == [SendAssign("c")]
    says(r, 111.0, "finishing", "a", "b")
    assert says(r, 112.0, "ready", "c") == []
    assert done(r, 113.0, "a", "b") == [WorkersDone()]
    assert set(r.stop()) == {SendRelease("a"), SendRelease("b"), SendRelease("c")}


def test_a_node_that_is_taken_gives_the_script_its_grace():
    r = running("a", "b")
    says(r, 110.0, "finishing", "a", "b")
    assert r.move(("a",), 111.0, within_s=30.0) == []
    limit = 111.0 + SETTINGS.self_exit_limit_s(30.0)
    assert 130.0 < limit < 136.0
    assert r.next_wakeup() == pytest.approx(limit)
    assert r.tick(limit - 1.0) == []
    assert r.move(("a", "c"), 112.0) == []  # a plan in between takes no time away and adds none
    assert r.next_wakeup() == pytest.approx(limit)
    assert r.tick(limit)[:2] == [SendRelease("b"), SaveRound(2, ("a",))]


def test_a_node_that_is_taken_after_a_planned_change_gives_it_too():
    r = running("a", "b")
    says(r, 110.0, "finishing", "a", "b")
    r.move(("a",), 111.0)
    r.move(("b",), 120.0, within_s=10.0)
    assert r.next_wakeup() == pytest.approx(120.0 + SETTINGS.self_exit_limit_s(10.0))
    assert done(r, 121.0, "b", "a") == [WorkersDone()]


def test_a_script_that_trains_on_after_all_is_changed_then():
    r = running("a", "b")
    says(r, 110.0, "finishing", "b")
    r.move(("a",), 111.0)
    assert says(r, 112.0, "running", "b") == [SendDrain("a", 1, 1)]
    assert r.stage is RoundStage.DRAINING


def test_a_node_lost_after_its_workers_were_done_is_not_missed():
    r = running("a", "b")
    done(r, 110.0, "b")
    r.gone("b", 111.0)
    assert not r.lost_member
    assert r.move(("a",), 112.0) == []
    assert done(r, 113.0, "a") == [WorkersDone()]


def test_a_node_lost_before_its_workers_were_done_means_another_round():
    r = running("a", "b", "c")
    done(r, 110.0, "a", size=3)
    r.move(("a", "b"), 110.5)
    r.gone("c", 111.0)
    assert SaveRound(2, ("a", "b")) in r.move(("a", "b"), 112.0)
    assert done(r, 113.0, "b", size=3) == []  # of a round that one of three has not ended


def test_a_worker_that_fails_after_another_was_done_uses_up_a_try():
    r = running("a", "b")
    done(r, 110.0, "a")
    fails(r, 111.0, "b")
    [broke] = r.tick(111.0 + SETTINGS.failure_grace_s)
    assert isinstance(broke, Broke)
    assert "ValueError: oops" in broke.sentence
    assert SaveRound(2, ("a", "b")) in r.move(("a", "b"), 114.0)


def test_one_that_dies_of_its_peer_during_a_change_goes_to_the_next_round():
    """A script with a handler of SIGTERM ends with 0 where the node is taken."""
    r = running("a", "b")
    r.move(("a",), 110.0, within_s=30.0)
    done(r, 110.1, "b")
    assert r.stage is FINISHING
    actions = fails(r, 110.2, "a", tail=CLOSED)
    assert actions[:2] == [SendRelease("b"), SaveRound(2, ("a",))]
    assert not [a for a in actions if isinstance(a, Broke)]


def forming():
    """A job whose second round is being formed; rank 0 has not said that it serves the store."""
    r = running("a", "b")
    r.move(("a", "b", "c"), 110.0)
    says(r, 111.0, "ready", "c")
    assert SendRound("a", 2, 0, 3, None) in r.drained("a", 1, 112.0)
    return r


def test_an_end_on_all_nodes_counts_whatever_round_is_being_formed():
    r = forming()
    assert done(r, 112.1, "b") == []
    assert done(r, 112.1, "a") == [WorkersDone()]
    assert r.stage is RoundStage.COMPLETED
    r = forming()
    done(r, 112.1, "a")
    r.store_up("a", 2, *STORE)
    says(r, 112.2, "running", "a")  # it has begun anew already
    assert done(r, 112.3, "b") == [WorkersDone()]


def test_an_end_on_some_nodes_of_an_older_round_is_none():
    r = forming()
    done(r, 112.1, "a")
    r.store_up("a", 2, *STORE)
    assert says(r, 113.0, "running", "a", "b", "c") == [WorkersRunning(2, ("a", "b", "c"))]
    assert not r.finishing


def adopted(generation, members, **phases):
    r = RestartRounds(SETTINGS)
    assignments = {
        node: Assignment("j", AssignmentPhase(phase), number, size=size)
        for node, (phase, number, size) in phases.items()
    }
    return r, r.adopt(generation, members, assignments, 200.0)


@pytest.mark.parametrize("generation", [1, 2], ids=["newest", "a round was saved and never told"])
def test_a_daemon_that_starts_again_finds_the_job_done(generation):
    ends = {"a": ("succeeded", 1, 2), "b": ("succeeded", 1, 2)}
    members = ("a", "b") if generation == 1 else ("a",)
    r, actions = adopted(generation, members, **ends)
    assert actions == [WorkersDone()]
    assert r.stage is RoundStage.COMPLETED


def test_a_daemon_that_starts_again_finds_the_script_at_its_end():
    r, actions = adopted(1, ("a", "b"), a=("finishing", 1, 0), b=("succeeded", 1, 2))
    assert WorkersDone() not in actions
    assert r.finishing
    assert r.move(("b", "c"), 201.0) == []
    assert done(r, 202.0, "a") == [WorkersDone()]


def test_a_daemon_that_starts_again_does_not_take_a_part_for_the_whole():
    _, actions = adopted(2, ("a",), a=("succeeded", 1, 2))
    assert WorkersDone() not in actions


# --- live mode ---


def live_done(job, *nodes, size=2):
    assignment = Assignment("job", AssignmentPhase.SUCCEEDED, 1, size=size)
    return [action for node in nodes for action in job.rounds.phase(node, assignment, job.now)]


@pytest.mark.parametrize("nodes", [("a",), ("b",), ("a", "b", "c"), ()])
def test_a_planned_change_of_a_live_job_waits_for_the_end(nodes):
    job = Live("a", "b")
    job.says("b", "finishing")
    assert job.rounds.move(nodes, job.now) == []
    assert job.rounds.stage is FINISHING
    assert live_done(job, "a", "b") == [WorkersDone()]


def test_leavers_of_a_live_job_that_are_in_their_last_lines_are_awaited():
    job = Live("a", "b")
    job.rounds.move(("b",), job.now)
    job.says("a", "finishing", 1)
    job.now += 10 * SETTINGS.join_s
    assert not [a for a in job.rounds.tick(job.now) if not isinstance(a, SendRound)]
    assert WorkersDone() not in live_done(job, "b")
    assert live_done(job, "a") == [WorkersDone()]


def test_a_node_of_a_live_job_lost_after_its_end_stops_nobody():
    job = Live("a", "b")
    live_done(job, "b")
    assert job.rounds.gone("b", job.now) == []
    assert live_done(job, "a") == [WorkersDone()]


# --- those that wait for its nodes ---


def test_a_node_that_another_job_still_leaves_is_not_rejected():
    r = RestartRounds(SETTINGS)
    r.move(("a", "b"), 0.0)
    r.occupied("b")
    says(r, 1.0, "ready", "a")
    first = r.tick(SETTINGS.warmup_s)
    assert SaveRound(1, ("a",)) in first
    assert not [a for a in first if isinstance(a, NodesRejected)]
    says(r, 61.0, "running", "a")
    assert r.stage is RoundStage.WARMING
    assert r.tick(61.0 + SETTINGS.warmup_s) == []
    assert says(r, 200.0, "starting", "b") == []
    assert r.next_wakeup() == 200.0 + SETTINGS.warmup_s
    assert says(r, 201.0, "ready", "b") == [SendDrain("a", 1, 1)]
