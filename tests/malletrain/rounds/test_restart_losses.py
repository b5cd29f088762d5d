"""The rounds of one job when nodes are lost, must be left before a deadline, or never come up."""

from __future__ import annotations

import pytest

from malletrain.rounds.interface import (
    Broke,
    NodesRejected,
    RoundStage,
    SaveRound,
    SendAssign,
    SendDrain,
    SendRelease,
    SendRound,
    WorkersRunning,
)
from malletrain.rounds.restart import RestartRounds
from tests.malletrain.rounds.rounds_tables import (
    CLOSED,
    SETTINGS,
    STORE,
    fails,
    running,
    says,
    settle,
)

# --- a node is lost ---


def test_survivors_and_ready_joiners_form_a_round_without_a_drain():
    r = running("a", "b", "c")
    r.move(("a", "b", "c", "d", "e"), 110.0)
    says(r, 111.0, "ready", "d")
    assert r.gone("a", 112.0) == []
    fails(r, 112.5, "b", tail=CLOSED)
    assert r.move(("b", "c", "d", "e"), 113.0) == [
        SaveRound(2, ("b", "c", "d")),
        SendRound("b", 2, 0, 3, None),
    ]


def test_those_that_are_left_after_a_loss_wait_for_no_joiner():
    r = running("a", "b")
    r.gone("b", 110.0)
    assert r.move(("a", "c"), 111.0) == [
        SendAssign("c"),
        SaveRound(2, ("a",)),
        SendRound("a", 2, 0, 1, None),
    ]
    assert r.tick(130.0) == []
    assert says(r, 131.0, "running", "a") == [WorkersRunning(2, ("a",))]
    assert r.stage is RoundStage.WARMING, "the joiner comes up while the others train"
    assert says(r, 132.0, "ready", "c") == [SendDrain("a", 2, 1)]
    assert SaveRound(3, ("a", "c")) in r.drained("a", 2, 133.0)


def test_when_too_few_are_left_to_train_the_wait_for_joiners_is_long():
    r = running("a", "b", low=2)
    r.gone("b", 110.0)
    r.move(("a", "c"), 111.0)
    assert r.next_wakeup() == 171.0


def test_a_loss_in_the_middle_of_a_drain_goes_straight_to_the_next_round():
    r = running("a", "b", "c")
    r.move(("a", "b", "c", "d"), 110.0)
    says(r, 111.0, "ready", "d")
    assert r.gone("b", 112.0) == [SaveRound(2, ("a", "c", "d")), SendRound("a", 2, 0, 3, None)]
    assert r.move(("a", "c", "d"), 113.0) == [], "the plan that follows changes nothing"
    assert settle(r, 114.0, "a", "c", "d").stage is RoundStage.RUNNING


def test_a_leaver_that_goes_before_the_drain_is_over_is_no_surprise():
    r = running("a", "b")
    r.move(("a",), 110.0, within_s=5.0)
    assert r.gone("b", 111.0) == [SaveRound(2, ("a",)), SendRound("a", 2, 0, 1, None)]


def test_under_the_minimum_nothing_is_formed_and_no_failure_is_told():
    r = RestartRounds(SETTINGS, min_nodes=2)
    r.move(("a", "b"), 0.0)
    says(r, 1.0, "ready", "a")
    assert r.gone("b", 2.0) == []
    assert r.tick(1000.0) == []
    assert r.tick(2000.0) == []
    assert r.move((), 3.0) == [SendRelease("a")]

    r = running("a", "b", low=2)
    r.move(("a", "b", "c"), 110.0)
    says(r, 111.0, "ready", "c")
    r.gone("c", 112.0)
    assert r.gone("b", 112.0) == []
    assert r.stage is RoundStage.WARMING
    assert r.move((), 113.0) == [SendRelease("a")]


def test_a_member_lost_while_the_round_is_formed():
    r = running("a")
    r.move(("a", "b"), 110.0)
    says(r, 111.0, "ready", "b")
    r.drained("a", 1, 112.0)
    assert r.gone("b", 113.0) == []
    assert r.move(("a",), 114.0) == [SaveRound(3, ("a",)), SendRound("a", 3, 0, 1, None)]


def test_if_no_plan_follows_a_loss_the_round_goes_on_without_the_lost_node():
    r = running("a")
    r.move(("a", "b"), 110.0)
    says(r, 111.0, "ready", "b")
    r.drained("a", 1, 112.0)
    r.gone("b", 113.0)
    assert r.tick(172.0) == [SaveRound(3, ("a",)), SendRound("a", 3, 0, 1, None)]


def test_the_node_of_the_store_is_lost_before_the_others_heard_of_it():
    r = running("a", "b")
    r.move(("a", "b", "c"), 110.0)
    says(r, 111.0, "ready", "c")
    r.drained("a", 1, 112.0)
    r.gone("a", 113.0)
    assert r.move(("b", "c"), 114.0) == [SaveRound(3, ("b", "c")), SendRound("b", 3, 0, 2, None)]
    assert r.store_up("a", 2, *STORE) == []
    assert r.store_up("b", 3, "b", 1) == [SendRound("c", 3, 1, 2, ("b", 1))]


# --- before a deadline ---


def test_before_a_deadline_survivors_go_on_and_grow_when_the_joiner_is_ready():
    r = running("a", "b")
    assert r.move(("a", "c"), 110.0, within_s=5.0) == [SendAssign("c"), SendDrain("a", 1, 1)]
    assert r.drain_s == 3.0
    assert r.drained("a", 1, 111.0) == [
        SendRelease("b"),
        SaveRound(2, ("a",)),
        SendRound("a", 2, 0, 1, None),
    ]
    r.store_up("a", 2, *STORE)
    says(r, 112.0, "starting", "c")
    assert says(r, 113.0, "running", "a") == [WorkersRunning(2, ("a",))]
    assert r.stage is RoundStage.WARMING
    assert says(r, 115.0, "ready", "c") == [SendDrain("a", 2, 2)]
    assert r.drained("a", 2, 116.0) == [SaveRound(3, ("a", "c")), SendRound("a", 3, 0, 2, None)]


def test_a_joiner_that_is_ready_in_time_takes_part_at_once():
    r = running("a", "b")
    r.move(("a", "b", "c"), 105.0)
    r.move(("a", "c"), 110.0, within_s=5.0)
    says(r, 110.5, "ready", "c")
    assert r.drained("a", 1, 111.0)[:2] == [SendRelease("b"), SaveRound(2, ("a", "c"))]


def test_without_enough_survivors_the_job_gives_the_joiners_a_moment_and_saves_in_time():
    r = running("a", "b", low=2)
    assert r.move(("a", "c"), 110.0, within_s=20.0) == [SendAssign("c")]
    assert r.next_wakeup() == 111.0
    assert r.tick(111.0) == [SendDrain("a", 1, 1)]
    assert r.drained("a", 1, 112.0) == [SendRelease("b")]
    assert r.stage is RoundStage.WARMING
    assert says(r, 125.0, "ready", "c") == [SaveRound(2, ("a", "c")), SendRound("a", 2, 0, 2, None)]


def test_a_deadline_at_which_nothing_of_the_new_nodes_is_up_yet_is_nobodys_fault():
    r = running("a")
    assert r.move(("b",), 110.0, within_s=10.0) == [SendAssign("b")]
    assert r.next_wakeup() == 111.0
    assert r.tick(111.0) == [SendDrain("a", 1, 1)]
    assert r.drained("a", 1, 112.0) == [SendRelease("a")]
    assert says(r, 120.0, "ready", "b") == [SaveRound(2, ("b",)), SendRound("b", 2, 0, 1, None)]


def test_a_leaving_joiner_is_no_reason_to_cut_the_wait_short():
    r = running("a")
    r.move(("a", "b", "c"), 110.0)
    assert r.move(("a", "b"), 111.0, within_s=5.0) == [SendRelease("c")]
    assert r.stage is RoundStage.WARMING
    assert says(r, 115.0, "ready", "b") == [SendDrain("a", 1, 1)]


def test_a_second_shorter_notice_shortens_the_drain():
    r = running("a", "b", "c")
    r.move(("a", "b"), 110.0, within_s=60.0)
    assert r.next_wakeup() == 120.0
    assert r.move(("a",), 111.0, within_s=2.0) == []
    assert r.next_wakeup() == pytest.approx(112.2)


# --- launchers that do not come up ---


def test_a_joiner_that_does_not_come_up_is_rejected_and_nothing_was_disturbed():
    r = running("a")
    r.move(("a", "b"), 110.0)
    assert r.next_wakeup() == 170.0
    assert r.tick(170.0) == [
        SendRelease("b"),
        NodesRejected(("b",), "the launcher did not come up there in time"),
        WorkersRunning(1, ("a",)),
    ]
    assert (r.stage, r.target) == (RoundStage.RUNNING, ("a",))


def test_partial_growth():
    r = running("a")
    r.move(("a", "b", "c"), 110.0)
    says(r, 111.0, "ready", "b")
    assert r.tick(170.0) == [
        SendRelease("c"),
        NodesRejected(("c",), "the launcher did not come up there in time"),
        SendDrain("a", 1, 1),
    ]


def test_a_launcher_that_ends_on_one_node_has_that_node_rejected():
    r = RestartRounds(SETTINGS)
    r.move(("a", "b"), 0.0)
    assert says(r, 1.0, "exited", "b") == [], "it may be the job's fault"
    actions = says(r, 2.0, "ready", "a")
    assert actions[:2] == [
        SendRelease("b"),
        NodesRejected(("b",), "the launcher ended there at once"),
    ]
    assert actions[2:] == [SaveRound(1, ("a",)), SendRound("a", 1, 0, 1, None)]


def test_a_member_whose_launcher_ends_while_a_joiner_is_awaited_is_started_again():
    r = running("a", "b", "c")
    r.move(("a", "b", "c", "d"), 110.0)
    assert r.deadline == 170.0
    assert says(r, 112.0, "exited", "c", generation=1) == [SendAssign("c")]
    assert r.deadline == 127.0, "the others stand still"
    assert r.tick(114.0) == []
    assert says(r, 120.0, "exited", "c", generation=1) == [SendAssign("c")], "a repeated report"
    assert r.deadline == 127.0
    says(r, 121.0, "ready", "c")
    assert says(r, 122.0, "ready", "d")[0] == SaveRound(2, ("a", "b", "c", "d"))


def test_a_launcher_that_is_started_again_gets_no_more_time_than_a_joiner():
    r = running("a", "b", "c")
    r.move(("a", "b", "c", "d"), 110.0)
    says(r, 112.0, "exited", "c", generation=1)
    assert r.tick(114.0) == []
    assert r.tick(127.0) == [
        SendRelease("c"),
        SendRelease("d"),
        NodesRejected(("c", "d"), "the launcher did not come up there in time"),
        SaveRound(2, ("a", "b")),
        SendRound("a", 2, 0, 2, None),
    ]


def test_without_the_member_whose_launcher_ended_too_few_wait_as_long_as_for_any_joiner():
    r = running("a", "b", low=2)
    r.move(("a", "b", "c"), 110.0)
    assert says(r, 112.0, "exited", "b", generation=1) == [SendAssign("b")]
    assert r.deadline == 170.0


def test_a_setup_that_fails_everywhere_is_the_jobs_fault_and_spoils_no_node():
    r = RestartRounds(SETTINGS)
    r.move(("a", "b", "c"), 0.0)
    assert says(r, 1.0, "exited", "b", "a") == []
    (broke,) = says(r, 2.0, "exited", "c")
    assert isinstance(broke, Broke)
    assert "ended at once on a, b, c" in broke.sentence
    assert r.stage is RoundStage.IDLE
    assert r.move(("a", "b", "c"), 3.0) == [SendAssign("a"), SendAssign("b"), SendAssign("c")]


def test_no_launcher_anywhere_in_time_is_a_try():
    r = RestartRounds(SETTINGS)
    r.move(("a", "b"), 0.0)
    assert r.tick(60.0) == [Broke((), "No launcher came up in time on a, b.")]


def test_a_rejected_node_that_the_minimum_needs_leaves_the_rest_to_the_controller():
    r = RestartRounds(SETTINGS, min_nodes=2)
    r.move(("a", "b"), 0.0)
    says(r, 1.0, "ready", "a")
    assert r.tick(60.0) == [
        SendRelease("b"),
        NodesRejected(("b",), "the launcher did not come up there in time"),
    ]
    assert r.tick(1000.0) == []
    assert r.move(("a", "c"), 61.0) == [SendAssign("c")]
    assert says(r, 62.0, "ready", "c")[0] == SaveRound(1, ("a", "c"))


def test_those_that_are_there_begin_when_the_minimum_is_lowered_to_them():
    """They were too few when the last of them came up: found by a simulated day."""
    r = RestartRounds(SETTINGS, min_nodes=3)
    r.move(("a", "b", "c"), 0.0)
    says(r, 1.0, "ready", "a", "b")
    r.gone("c", 2.0)
    r.min_nodes = 1
    at = r.next_wakeup()
    assert at is not None
    assert r.tick(at)[0] == SaveRound(1, ("a", "b"))


def test_a_second_notice_gives_other_joiners_no_time_of_their_own():
    """The first node has to be gone when it had to: found by a simulated day."""
    r = running("a")
    assert r.move(("b",), 110.0, within_s=10.0) == [SendAssign("b")]
    assert r.next_wakeup() == 111.0
    assert SendAssign("c") in r.move(("c",), 110.9, within_s=9.1)
    assert r.next_wakeup() == 111.0
    assert SendDrain("a", 1, 1) in r.tick(111.0)
