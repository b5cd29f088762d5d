"""The rounds of one job as tables: what the controller and the agents say, and what is to be
done.
"""

from __future__ import annotations

import pytest

from malletrain.protocol.messages import Assignment, Failure
from malletrain.protocol.phases import AssignmentPhase
from malletrain.rounds.interface import (
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
from tests.malletrain.rounds.rounds_tables import CLOSED, SETTINGS, STORE, running, says, settle

# --- the picture: start, grow, shrink ---


def test_first_start_step_by_step():
    r = RestartRounds(SETTINGS, min_nodes=2)
    assert r.move(("a", "b", "c"), 0.0) == [SendAssign("a"), SendAssign("b"), SendAssign("c")]
    assert r.stage is RoundStage.WARMING
    assert says(r, 1.0, "starting", "a", "b", "c") == []
    assert says(r, 2.0, "ready", "b", "a") == []
    assert says(r, 3.0, "ready", "c") == [
        SaveRound(1, ("a", "b", "c")),
        SendRound("a", 1, 0, 3, None),
    ]
    assert r.store_up("a", 1, *STORE) == [
        SendRound("b", 1, 1, 3, STORE),
        SendRound("c", 1, 2, 3, STORE),
    ]
    assert says(r, 4.0, "running", "a", "c") == []
    assert says(r, 5.0, "running", "b") == [WorkersRunning(1, ("a", "b", "c"))]
    assert r.stage is RoundStage.RUNNING
    assert r.next_wakeup() is None


def test_joiners_warm_up_while_the_others_train_and_nothing_is_disturbed_before_they_are_ready():
    r = running("a", "b")
    assert r.move(("a", "b", "c"), 110.0) == [SendAssign("c")]
    assert says(r, 112.0, "starting", "c") == []
    assert says(r, 115.0, "ready", "c") == [SendDrain("a", 1, 1)]
    assert r.stage is RoundStage.DRAINING
    assert r.drained("b", 1, 115.5) == []
    assert r.drained("a", 1, 116.0) == [
        SaveRound(2, ("a", "b", "c")),
        SendRound("a", 2, 0, 3, None),
    ]
    assert r.store_up("a", 2, *STORE) == [
        SendRound("b", 2, 1, 3, STORE),
        SendRound("c", 2, 2, 3, STORE),
    ]
    assert says(r, 118.0, "running", "a", "b", "c") == [WorkersRunning(2, ("a", "b", "c"))]


def test_workers_that_live_and_hang_get_a_new_round_on_the_nodes_that_they_have():
    r = running("a", "b")
    r.give_up()
    assert r.move(("a", "b"), 110.0) == [SaveRound(2, ("a", "b")), SendRound("a", 2, 0, 2, None)]
    assert r.stage is RoundStage.FORMING
    assert r.store_up("a", 2, *STORE) == [SendRound("b", 2, 1, 2, STORE)]
    assert says(r, 118.0, "running", "a", "b") == [WorkersRunning(2, ("a", "b"))]
    assert not r.lost_member


def test_leavers_are_released_only_after_the_drain():
    r = running("a", "b", "c")
    assert r.move(("b",), 110.0) == [SendDrain("a", 1, 1)]
    assert r.drained("a", 1, 111.0) == [
        SendRelease("a"),
        SendRelease("c"),
        SaveRound(2, ("b",)),
        SendRound("b", 2, 0, 1, None),
    ]
    assert says(r, 111.2, "failed", "b", generation=1) == [
        SendRound("b", 2, 0, 1, None)
    ]  # its peers were stopped first
    assert says(r, 112.0, "running", "b") == [WorkersRunning(2, ("b",))]
    assert r.released("a", 113.0) == r.released("c", 113.0) == []


def test_survivors_keep_their_order_so_that_rank_0_has_the_state():
    r = running("c", "a", "b")
    r.move(("b", "d", "c"), 110.0)
    assert says(r, 111.0, "ready", "d") == [SendDrain("c", 1, 1)]
    assert r.drained("c", 1, 112.0)[:2] == [SendRelease("a"), SaveRound(2, ("c", "b", "d"))]


def test_a_suspended_job_saves_what_it_has_and_lets_go():
    r = running("a", "b")
    assert r.move((), 110.0, within_s=20.0) == [SendDrain("a", 1, 1)]
    assert r.drain_s == 10.0
    assert r.drained("a", 1, 111.0) == [SendRelease("a"), SendRelease("b")]
    assert (r.stage, r.members, r.next_wakeup()) == (RoundStage.IDLE, (), None)


def test_a_suspended_job_starts_again_with_a_new_generation():
    r = running("a")
    r.move((), 110.0)
    r.drained("a", 1, 111.0)
    r.released("a", 112.0)
    assert r.move(("b",), 200.0) == [SendAssign("b")]
    assert says(r, 203.0, "ready", "b") == [SaveRound(2, ("b",)), SendRound("b", 2, 0, 1, None)]


def test_a_drain_without_an_answer_ends_in_time():
    r = running("a", "b")
    r.move(("a",), 110.0)
    assert r.next_wakeup() == 120.0
    assert r.tick(119.9) == []
    assert r.tick(120.0)[:2] == [SendRelease("b"), SaveRound(2, ("a",))]


def test_while_nobody_can_take_a_snapshot_there_is_no_drain():
    r = running("a", "b")
    r.gone("a", 110.0)
    assert r.move(("b",), 111.0) == [SaveRound(2, ("b",)), SendRound("b", 2, 0, 1, None)]


# --- success ---


def test_the_job_is_done_when_every_member_is():
    r = running("a", "b")
    assert says(r, 110.0, "succeeded", "a") == []
    assert says(r, 110.1, "succeeded", "b") == [WorkersDone()]
    assert r.stage is RoundStage.COMPLETED
    assert r.move(("a", "b", "c"), 110.2) == []
    assert r.stop() == [SendRelease("a"), SendRelease("b")]


@pytest.mark.parametrize("stage", [RoundStage.WARMING, RoundStage.DRAINING])
def test_a_job_that_ends_well_in_the_middle_of_a_rescale_is_done(stage):
    r = running("a", "b")
    r.move(("a", "b", "c"), 110.0)
    if stage is RoundStage.DRAINING:
        says(r, 111.0, "ready", "c")
    assert r.stage is stage
    back = [SendDrain("a", 1, 0)] if stage is RoundStage.DRAINING else []
    assert says(r, 112.0, "succeeded", "a") == back
    assert r.drained("b", 1, 112.0) == []
    assert says(r, 112.5, "succeeded", "b") == [WorkersDone()]
    assert set(r.stop()) == {SendRelease("a"), SendRelease("b"), SendRelease("c")}


def test_when_rank_0_is_done_the_others_get_the_time_that_they_take():
    r = running("a", "b")
    r.move(("a", "b", "c"), 110.0)
    says(r, 111.0, "succeeded", "a")
    assert says(r, 112.0, "ready", "c") == []
    assert (r.stage, r.next_wakeup()) == (RoundStage.FINISHING, None)
    assert says(r, 113.0, "succeeded", "b") == [WorkersDone()]


def test_a_node_lost_before_its_worker_was_done_means_another_round():
    r = running("a", "b")
    says(r, 110.0, "succeeded", "a")
    assert r.gone("b", 111.0) == []
    assert r.move(("a",), 112.0) == [SaveRound(2, ("a",)), SendRound("a", 2, 0, 1, None)]
    says(r, 113.0, "running", "a")
    assert says(r, 120.0, "succeeded", "a") == [WorkersDone()]


def test_a_success_of_an_old_round_is_not_the_end():
    r = running("a")
    r.move(("a", "b"), 110.0)
    says(r, 111.0, "ready", "b")
    r.drained("a", 1, 112.0)
    says(r, 113.0, "running", "b")
    assert says(r, 113.0, "succeeded", "a", generation=1) == [SendRound("a", 2, 0, 2, None)]
    assert r.stage is RoundStage.FORMING


# --- released and wanted again ---


def test_a_node_released_and_wanted_again_is_assigned_when_it_is_free():
    r = running("a", "b")
    r.move(("a",), 110.0)
    r.drained("a", 1, 111.0)
    settle(r, 112.0, "a")
    assert r.move(("a", "b"), 113.0) == []
    assert says(r, 113.5, "running", "b", generation=1) == [], "late news of what is being stopped"
    assert r.released("b", 114.0) == [SendAssign("b")]
    assert says(r, 115.0, "ready", "b") == [SendDrain("a", 2, 2)]


def test_a_joiner_no_longer_wanted_is_released_at_once():
    r = running("a")
    r.move(("a", "b"), 110.0)
    assert r.move(("a",), 111.0) == [SendRelease("b"), WorkersRunning(1, ("a",))]
    assert r.stage is RoundStage.RUNNING


def test_a_node_that_was_given_back_can_run_the_job_again_later():
    r = running("a")
    r.move(("a", "b"), 110.0)
    r.tick(170.0)
    r.gone("b", 171.0)
    assert r.move(("a", "b"), 500.0) == [SendAssign("b")]


def test_a_stray_launcher_is_told_to_stop():
    r = running("a")
    assert says(r, 110.0, "ready", "z") == [SendRelease("z")]
    assert says(r, 111.0, "ready", "z") == []


def test_an_agent_that_began_anew_is_assigned_again_and_nobody_is_to_blame():
    r = running("a", "b")
    assert r.released("b", 110.0) == [
        SendAssign("b"),
        SaveRound(2, ("a",)),
        SendRound("a", 2, 0, 1, None),
    ]
    assert r.phase(
        "a", Assignment("j1", AssignmentPhase.FAILED, 1, (Failure(0, 1, 0.0, CLOSED),)), 110.1
    ) == [SendRound("a", 2, 0, 1, None)]
    assert r.tick(113.0) == [], "it failed because of the one that began anew"
    assert says(r, 114.0, "running", "a") == [WorkersRunning(2, ("a",))]
    assert says(r, 115.0, "ready", "b") == [SendDrain("a", 2, 1)]


def test_stop_in_every_stage():
    for steps in range(5):
        r = RestartRounds(SETTINGS)
        todo = [
            lambda r=r: r.move(("a", "b"), 0.0),
            lambda r=r: says(r, 1.0, "ready", "a", "b"),
            lambda r=r: settle(r, 2.0, "a", "b"),
            lambda r=r: r.move(("a",), 3.0),
        ]
        for step in todo[:steps]:
            step()
        assert set(r.stop()) == ({SendRelease("a"), SendRelease("b")} if steps else set())
        assert r.stop() == []
        assert r.next_wakeup() is None


# --- move at any moment ---


def test_more_nodes_while_a_round_is_formed_join_it_when_it_runs():
    r = RestartRounds(SETTINGS)
    r.move(("a",), 0.0)
    says(r, 1.0, "ready", "a")
    assert r.move(("a", "b"), 2.0) == [SendAssign("b")]
    assert r.stage is RoundStage.FORMING
    assert says(r, 3.0, "ready", "b") == []
    assert says(r, 4.0, "running", "a") == [WorkersRunning(1, ("a",)), SendDrain("a", 1, 1)]


def test_fewer_nodes_while_a_round_is_formed_is_a_new_round_at_once():
    r = RestartRounds(SETTINGS)
    r.move(("a", "b"), 0.0)
    says(r, 1.0, "ready", "a", "b")
    assert r.move(("b",), 2.0, within_s=5.0) == [
        SendRelease("a"),
        SaveRound(2, ("b",)),
        SendRound("b", 2, 0, 1, None),
    ]


def test_another_target_in_the_middle_of_a_drain_counts_when_it_is_over():
    r = running("a", "b")
    r.move(("a",), 110.0)
    assert r.move(("b", "c"), 111.0) == [SendAssign("c")]
    assert r.stage is RoundStage.DRAINING
    assert r.drained("a", 1, 112.0) == [
        SendRelease("a"),
        SaveRound(2, ("b",)),
        SendRound("b", 2, 0, 1, None),
    ]
    r.store_up("b", 2, *STORE)
    says(r, 113.0, "ready", "c")
    assert says(r, 114.0, "running", "b") == [WorkersRunning(2, ("b",)), SendDrain("b", 2, 2)]


def test_back_to_the_old_target_in_the_middle_of_a_drain_does_not_leave_the_workers_standing():
    r = running("a", "b", low=2)
    r.move(("a", "c"), 110.0, within_s=5.0)
    r.tick(111.5)
    assert r.stage is RoundStage.DRAINING
    r.drained("a", 1, 112.0)
    assert r.stage is RoundStage.WARMING
    assert r.move(("a", "b"), 113.0) == [SendRelease("c")]
    assert r.released("b", 114.0) == [SendAssign("b")]
    assert says(r, 115.0, "ready", "b") == [SaveRound(2, ("a", "b")), SendRound("a", 2, 0, 2, None)]


def test_a_rescale_to_where_the_job_is_already_changes_nothing():
    r = running("a", "b")
    assert r.move(("b", "a"), 110.0) == [WorkersRunning(1, ("a", "b"))]
    assert r.stage is RoundStage.RUNNING


# --- late and lost messages ---


def test_messages_of_old_generations_are_ignored():
    r = running("a", "b")
    r.move(("a", "b", "c"), 110.0)
    says(r, 111.0, "ready", "c")
    r.drained("a", 1, 112.0)
    assert r.store_up("a", 1, *STORE) == []
    assert r.store_up("b", 2, *STORE) == []
    assert r.drained("a", 1, 112.5) == []
    assert says(r, 113.0, "failed", "b", generation=1) == []
    assert r.tick(130.0) == [], "the workers of the round before were stopped"
    r = running("a", "b")
    assert r.drained("a", 1, 110.0) == []
    assert r.store_up("a", 1, *STORE) == []
    assert r.stage is RoundStage.RUNNING


def test_a_round_lost_on_the_way_is_told_again_when_the_agent_says_where_it_stands():
    r = RestartRounds(SETTINGS)
    r.move(("a", "b"), 0.0)
    says(r, 1.0, "ready", "a", "b")
    assert says(r, 2.0, "ready", "a") == [SendRound("a", 1, 0, 2, None)]
    assert says(r, 2.0, "ready", "b") == [], "the store is not up yet"
    r.store_up("a", 1, *STORE)
    assert says(r, 3.0, "ready", "b") == [SendRound("b", 1, 1, 2, STORE)]


# --- another layout on the same nodes ---


def test_the_same_nodes_get_a_new_round_after_a_snapshot_once_they_are_outdated():
    r = running("a", "b")
    assert r.move(("a", "b"), 105.0) == [WorkersRunning(1, ("a", "b"))]
    r.outdate()
    assert r.move(("a", "b"), 110.0) == [SendDrain("a", 1, 1)]
    assert r.drained("a", 1, 111.0, 1) == [
        SaveRound(2, ("a", "b")),
        SendRound("a", 2, 0, 2, None),
    ]
    assert r.store_up("a", 2, *STORE) == [SendRound("b", 2, 1, 2, STORE)]
    assert says(r, 118.0, "running", "a", "b") == [WorkersRunning(2, ("a", "b"))]
    assert r.move(("a", "b"), 120.0) == [WorkersRunning(2, ("a", "b"))]


def test_a_change_of_nodes_meanwhile_is_one_round_with_it():
    r = running("a", "b", "c")
    r.outdate()
    assert r.move(("a", "b", "c"), 110.0) == [SendDrain("a", 1, 1)]
    assert r.move(("a", "b"), 110.5, within_s=30.0) == []
    assert r.drained("a", 1, 111.0, 1)[-2:] == [
        SaveRound(2, ("a", "b")),
        SendRound("a", 2, 0, 2, None),
    ]
    assert r.stage is RoundStage.FORMING
    assert not r.outdated


def test_members_that_serve_samples_are_named_to_all_of_a_round():
    r = RestartRounds(SETTINGS, min_nodes=1)
    r.move(("a", "b", "c"), 0.0)
    for node, address in (("a", "a:1"), ("b", ""), ("c", "c:3")):
        assignment = Assignment("j1", AssignmentPhase.READY, 0, data_address=address)
        actions = r.phase(node, assignment, 1.0)
    serving = (("a", "a:1"), ("c", "c:3"))
    assert actions == [
        SaveRound(1, ("a", "b", "c")),
        SendRound("a", 1, 0, 3, None, serving),
    ]
    assert r.store_up("a", 1, *STORE) == [
        SendRound("b", 1, 1, 3, STORE, serving),
        SendRound("c", 1, 2, 3, STORE, serving),
    ]
    r.holdings.note("b", Assignment("j1", AssignmentPhase.READY, 0, data_address="b:2"))
    assert r.holdings.samples(("b", "x")) == (("b", "b:2"),)
