"""The rounds of one job as tables: what the controller and the agents say, and what is to be done."""

from __future__ import annotations

import pytest

from malletrain.blame import by_cause, describe
from malletrain.rounds import (
    Broke,
    Finished,
    Formed,
    JobRounds,
    LeftOut,
    RoundSettings,
    SaveRound,
    SendAssign,
    SendDrain,
    SendRelease,
    SendRound,
    Stage,
)
from malletrain.wire import Assignment, Failure

SETTINGS = RoundSettings(warmup_s=60.0, warmup_broken_s=15.0, drain_s=10.0, join_s=60.0, verdict_s=2.0)
STORE = ("a", 29500)
CLOSED = "RuntimeError: Connection closed by peer [10.0.0.1]:4242"


def says(r, now, phase, *nodes, generation=None, failures=()):
    """The agents on ``nodes`` report ``phase``; what follows from all of them."""
    generation = (r.generation if phase in ("running", "succeeded", "failed") else 0) if generation is None else generation
    return [action for node in nodes for action in r.phase(node, Assignment("j", phase, generation, failures), now)]


def fails(r, now, node, *, rank=0, code=1, tail="ValueError: oops", time=None):
    failure = Failure(rank, code, now if time is None else time, tail)
    return says(r, now, "failed", node, failures=(failure,))


def running(*nodes, low=1, now=100.0):
    """A job whose first round runs on ``nodes``."""
    r = JobRounds(SETTINGS, min_nodes=low)
    r.move(nodes, now)
    says(r, now + 1, "ready", *nodes)
    r.store_up(nodes[0], 1, *STORE)
    says(r, now + 2, "running", *nodes)
    assert (r.stage, r.generation, r.members) == (Stage.RUNNING, 1, nodes)
    return r


def settle(r, now, *nodes):
    """The round that is being formed comes up on ``nodes``."""
    r.store_up(r.members[0], r.generation, *STORE)
    says(r, now, "running", *nodes)
    return r


# --- the picture: start, grow, shrink ---


def test_first_start_step_by_step():
    r = JobRounds(SETTINGS, min_nodes=2)
    assert r.move(("a", "b", "c"), 0.0) == [SendAssign("a"), SendAssign("b"), SendAssign("c")]
    assert r.stage is Stage.WARMING
    assert says(r, 1.0, "starting", "a", "b", "c") == []
    assert says(r, 2.0, "ready", "b", "a") == []
    assert says(r, 3.0, "ready", "c") == [SaveRound(1, ("a", "b", "c")), SendRound("a", 1, 0, 3, None)]
    assert r.store_up("a", 1, *STORE) == [SendRound("b", 1, 1, 3, STORE), SendRound("c", 1, 2, 3, STORE)]
    assert says(r, 4.0, "running", "a", "c") == []
    assert says(r, 5.0, "running", "b") == [Formed(1, ("a", "b", "c"))]
    assert r.stage is Stage.RUNNING
    assert r.next_wakeup() is None


def test_joiners_warm_up_while_the_others_train_and_nothing_is_disturbed_before_they_are_ready():
    r = running("a", "b")
    assert r.move(("a", "b", "c"), 110.0) == [SendAssign("c")]
    assert says(r, 112.0, "starting", "c") == []
    assert says(r, 115.0, "ready", "c") == [SendDrain("a", 1, 1)]
    assert r.stage is Stage.DRAINING
    assert r.drained("b", 1, 115.5) == []
    assert r.drained("a", 1, 116.0) == [SaveRound(2, ("a", "b", "c")), SendRound("a", 2, 0, 3, None)]
    assert r.store_up("a", 2, *STORE) == [SendRound("b", 2, 1, 3, STORE), SendRound("c", 2, 2, 3, STORE)]
    assert says(r, 118.0, "running", "a", "b", "c") == [Formed(2, ("a", "b", "c"))]


def test_leavers_are_released_only_after_the_drain():
    r = running("a", "b", "c")
    assert r.move(("b",), 110.0) == [SendDrain("a", 1, 1)]
    assert r.drained("a", 1, 111.0) == [SendRelease("a"), SendRelease("c"), SaveRound(2, ("b",)), SendRound("b", 2, 0, 1, None)]
    assert says(r, 111.2, "failed", "b", generation=1) == [SendRound("b", 2, 0, 1, None)]  # its peers were stopped first
    assert says(r, 112.0, "running", "b") == [Formed(2, ("b",))]
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
    assert (r.stage, r.members, r.next_wakeup()) == (Stage.IDLE, (), None)


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


# --- a node is lost ---


def test_survivors_and_ready_joiners_form_a_round_without_a_drain():
    r = running("a", "b", "c")
    r.move(("a", "b", "c", "d", "e"), 110.0)
    says(r, 111.0, "ready", "d")
    assert r.gone("a", 112.0) == []
    fails(r, 112.5, "b", tail=CLOSED)
    assert r.move(("b", "c", "d", "e"), 113.0) == [SaveRound(2, ("b", "c", "d")), SendRound("b", 2, 0, 3, None)]


def test_those_that_are_left_after_a_loss_wait_for_no_joiner():
    r = running("a", "b")
    r.gone("b", 110.0)
    assert r.move(("a", "c"), 111.0) == [SendAssign("c"), SaveRound(2, ("a",)), SendRound("a", 2, 0, 1, None)]
    assert r.tick(130.0) == []
    assert says(r, 131.0, "running", "a") == [Formed(2, ("a",))]
    assert r.stage is Stage.WARMING, "the joiner comes up while the others train"
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
    assert settle(r, 114.0, "a", "c", "d").stage is Stage.RUNNING


def test_a_leaver_that_goes_before_the_drain_is_over_is_no_surprise():
    r = running("a", "b")
    r.move(("a",), 110.0, within_s=5.0)
    assert r.gone("b", 111.0) == [SaveRound(2, ("a",)), SendRound("a", 2, 0, 1, None)]


def test_under_the_minimum_nothing_is_formed_and_nobody_is_blamed():
    r = JobRounds(SETTINGS, min_nodes=2)
    r.move(("a", "b"), 0.0)
    says(r, 1.0, "ready", "a")
    assert r.gone("b", 2.0) == []
    assert r.tick(1000.0) == []
    assert r.next_wakeup() is None
    assert r.move((), 3.0) == [SendRelease("a")]

    r = running("a", "b", low=2)
    r.move(("a", "b", "c"), 110.0)
    says(r, 111.0, "ready", "c")
    r.gone("c", 112.0)
    assert r.gone("b", 112.0) == []
    assert r.stage is Stage.WARMING
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


# --- in a hurry ---


def test_in_a_hurry_survivors_go_on_and_grow_when_the_joiner_is_ready():
    r = running("a", "b")
    assert r.move(("a", "c"), 110.0, within_s=5.0) == [SendAssign("c"), SendDrain("a", 1, 1)]
    assert r.drain_s == 3.0
    assert r.drained("a", 1, 111.0) == [SendRelease("b"), SaveRound(2, ("a",)), SendRound("a", 2, 0, 1, None)]
    r.store_up("a", 2, *STORE)
    says(r, 112.0, "starting", "c")
    assert says(r, 113.0, "running", "a") == [Formed(2, ("a",))]
    assert r.stage is Stage.WARMING
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
    assert r.stage is Stage.WARMING
    assert says(r, 125.0, "ready", "c") == [SaveRound(2, ("a", "c")), SendRound("a", 2, 0, 2, None)]


def test_a_hurry_in_which_nothing_of_the_new_nodes_is_up_yet_is_nobodys_fault():
    r = running("a")
    assert r.move(("b",), 110.0, within_s=10.0) == [SendAssign("b")]
    assert r.next_wakeup() == 111.0
    assert r.tick(111.0) == [SendDrain("a", 1, 1)]
    assert r.drained("a", 1, 112.0) == [SendRelease("a")]
    assert says(r, 120.0, "ready", "b") == [SaveRound(2, ("b",)), SendRound("b", 2, 0, 1, None)]


def test_a_leaving_joiner_is_no_reason_to_hurry():
    r = running("a")
    r.move(("a", "b", "c"), 110.0)
    assert r.move(("a", "b"), 111.0, within_s=5.0) == [SendRelease("c")]
    assert r.stage is Stage.WARMING
    assert says(r, 115.0, "ready", "b") == [SendDrain("a", 1, 1)]


def test_a_second_shorter_notice_shortens_the_drain():
    r = running("a", "b", "c")
    r.move(("a", "b"), 110.0, within_s=60.0)
    assert r.next_wakeup() == 120.0
    assert r.move(("a",), 111.0, within_s=2.0) == []
    assert r.next_wakeup() == pytest.approx(112.2)


# --- launchers that do not come up ---


def test_a_joiner_that_does_not_come_up_is_left_out_and_nothing_was_disturbed():
    r = running("a")
    r.move(("a", "b"), 110.0)
    assert r.next_wakeup() == 170.0
    assert r.tick(170.0) == [SendRelease("b"), LeftOut(("b",), "the launcher did not come up there in time"), Formed(1, ("a",))]
    assert (r.stage, r.target) == (Stage.RUNNING, ("a",))


def test_partial_growth():
    r = running("a")
    r.move(("a", "b", "c"), 110.0)
    says(r, 111.0, "ready", "b")
    assert r.tick(170.0) == [SendRelease("c"), LeftOut(("c",), "the launcher did not come up there in time"), SendDrain("a", 1, 1)]


def test_a_launcher_that_ends_on_one_node_makes_that_node_unfit():
    r = JobRounds(SETTINGS)
    r.move(("a", "b"), 0.0)
    assert says(r, 1.0, "exited", "b") == [], "it may be the job's fault"
    actions = says(r, 2.0, "ready", "a")
    assert actions[:2] == [SendRelease("b"), LeftOut(("b",), "the launcher ended there at once")]
    assert actions[2:] == [SaveRound(1, ("a",)), SendRound("a", 1, 0, 1, None)]


def test_a_setup_that_fails_everywhere_is_the_jobs_fault_and_spoils_no_node():
    r = JobRounds(SETTINGS)
    r.move(("a", "b", "c"), 0.0)
    assert says(r, 1.0, "exited", "b", "a") == []
    (broke,) = says(r, 2.0, "exited", "c")
    assert isinstance(broke, Broke)
    assert "ended at once on a, b, c" in broke.sentence
    assert r.stage is Stage.IDLE
    assert r.move(("a", "b", "c"), 3.0) == [SendAssign("a"), SendAssign("b"), SendAssign("c")]


def test_no_launcher_anywhere_in_time_is_a_try():
    r = JobRounds(SETTINGS)
    r.move(("a", "b"), 0.0)
    assert r.tick(60.0) == [Broke((), "No launcher came up in time on a, b.")]


def test_a_node_left_out_that_the_minimum_needs_leaves_the_rest_to_the_controller():
    r = JobRounds(SETTINGS, min_nodes=2)
    r.move(("a", "b"), 0.0)
    says(r, 1.0, "ready", "a")
    assert r.tick(60.0) == [SendRelease("b"), LeftOut(("b",), "the launcher did not come up there in time")]
    assert r.next_wakeup() is None
    assert r.move(("a", "c"), 61.0) == [SendAssign("c")]
    assert says(r, 62.0, "ready", "c")[0] == SaveRound(1, ("a", "c"))


# --- workers that fail ---


def test_a_crash_is_reported_after_the_verdict_with_the_first_cause():
    r = running("a", "b", "c")
    assert fails(r, 110.0, "c", rank=2, tail=f"first\n{CLOSED}", time=109.8) == []
    assert fails(r, 110.1, "b", rank=1, tail="Traceback\nValueError: bad batch\n\n", time=109.9) == []
    assert fails(r, 110.2, "a", rank=0, code=-15, tail="", time=109.7) == []
    assert r.tick(111.9) == []
    (broke,) = r.tick(112.0)
    assert [f.rank for f in broke.failures] == [1, 0, 2]
    assert broke.sentence == "Rank 1 exited with code 1. Its last line: ValueError: bad batch"
    assert r.next_wakeup() is None


def test_a_crash_is_reported_once_however_late_the_other_ranks_notice():
    r = running("a", "b")
    fails(r, 110.0, "b", rank=1)
    assert len(r.tick(112.0)) == 1
    assert fails(r, 114.0, "a", tail=CLOSED) == []
    assert r.tick(130.0) == []
    assert r.move(("a", "b"), 131.0) == [SaveRound(2, ("a", "b")), SendRound("a", 2, 0, 2, None)]
    settle(r, 132.0, "a", "b")
    fails(r, 140.0, "a")
    assert len(r.tick(142.0)) == 1, "the next round's crash counts again"


def test_a_crash_that_was_reported_is_not_reported_again_while_joiners_come_up():
    r = running("a", "b")
    fails(r, 110.0, "b", rank=1)
    assert len(r.tick(112.0)) == 1
    r.move(("a", "b", "c"), 112.0)
    assert fails(r, 113.0, "a") == []
    assert r.tick(126.9) == []
    assert says(r, 126.9, "ready", "c")[0] == SaveRound(2, ("a", "b", "c"))


def test_a_loss_while_joiners_come_up_shortens_the_wait_for_them():
    r = running("a", "b", "c")
    r.move(("a", "c", "d"), 110.0)
    assert r.next_wakeup() == 170.0
    r.gone("b", 111.0)
    assert r.next_wakeup() == 126.0


def test_a_crash_while_joiners_come_up_counts_too():
    r = running("a")
    r.move(("a", "b"), 110.0)
    assert fails(r, 112.0, "a") == []
    (broke,) = r.tick(114.0)
    assert isinstance(broke, Broke)
    assert r.move(("a", "b"), 114.0) == []
    assert says(r, 115.0, "ready", "b")[0] == SaveRound(2, ("a", "b"))


def test_a_launcher_that_ends_while_the_job_runs():
    r = running("a", "b")
    says(r, 110.0, "exited", "b")
    (broke,) = r.tick(112.0)
    assert "launcher ended on b" in broke.sentence
    assert r.move(("a", "b"), 112.0) == [SendAssign("b")]
    assert r.next_wakeup() == 127.0
    assert says(r, 114.0, "ready", "b") == [SaveRound(2, ("a", "b")), SendRound("a", 2, 0, 2, None)]


@pytest.mark.parametrize("first", ["failures", "loss"])
def test_failures_because_of_a_lost_node_are_no_failure_of_the_job(first):
    r = running("a", "b", "c")
    if first == "failures":
        fails(r, 110.0, "a", tail=CLOSED)
        r.gone("b", 111.0)
    else:
        r.gone("b", 110.0)
        fails(r, 111.0, "a", tail=CLOSED)
    fails(r, 111.5, "c", tail=CLOSED)
    assert r.tick(150.0) == []
    assert r.next_wakeup() is None
    assert r.move(("a", "c"), 151.0)[0] == SaveRound(2, ("a", "c"))


def test_when_every_last_word_speaks_of_a_peer_the_news_of_a_loss_gets_more_time():
    r = running("a", "b", "c")
    fails(r, 110.0, "a", tail=CLOSED)
    fails(r, 110.0, "c", tail=CLOSED)
    assert r.tick(112.0) == []
    assert r.next_wakeup() == 116.0
    r.gone("b", 115.0)
    assert r.tick(116.0) == []

    r = running("a", "b")
    fails(r, 110.0, "a", tail=CLOSED)
    r.tick(112.0)
    (broke,) = r.tick(116.0)
    assert broke.sentence.startswith("Rank 0 exited with code 1")


def test_while_an_agent_cannot_be_reached_there_is_no_verdict():
    r = running("a", "b")
    r.suspects.add("b")
    fails(r, 110.0, "a")
    assert r.tick(112.0) == []
    assert r.next_wakeup() == 114.0
    r.suspects.discard("b")
    assert len(r.tick(114.0)) == 1

    r = running("a", "b")
    r.suspects.add("b")
    fails(r, 110.0, "a")
    r.tick(112.0)
    r.gone("b", 113.0)
    assert r.next_wakeup() is None


def test_a_plan_that_comes_before_the_verdict_restarts_the_workers_anyway():
    r = running("a", "b")
    fails(r, 110.0, "a")
    assert r.move(("a",), 111.0)[:2] == [SendRelease("b"), SaveRound(2, ("a",))]
    assert r.tick(113.0) == []


def test_who_does_not_join_the_round_in_time_is_named():
    r = JobRounds(SETTINGS)
    r.move(("a", "b"), 0.0)
    says(r, 1.0, "ready", "a", "b")
    r.store_up("a", 1, *STORE)
    says(r, 2.0, "running", "a")
    assert r.tick(61.0) == [Broke((), "b did not join the round within 60 s.")]
    assert r.move(("a", "b"), 61.0) == [SaveRound(2, ("a", "b")), SendRound("a", 2, 0, 2, None)]


def test_a_member_that_cannot_be_reached_gets_more_time_to_join():
    r = JobRounds(SETTINGS)
    r.move(("a", "b"), 0.0)
    says(r, 1.0, "ready", "a", "b")
    r.suspects.add("b")
    assert r.tick(61.0) == []
    assert r.next_wakeup() == 63.0


def test_a_crash_at_once_breaks_the_round_that_was_never_formed():
    r = JobRounds(SETTINGS)
    r.move(("a", "b"), 0.0)
    says(r, 1.0, "ready", "a", "b")
    r.store_up("a", 1, *STORE)
    says(r, 2.0, "running", "a")
    assert fails(r, 2.5, "a") == []
    assert says(r, 3.0, "running", "b") == []
    (broke,) = r.tick(4.5)
    assert isinstance(broke, Broke)


# --- success ---


def test_the_job_is_done_when_every_member_is():
    r = running("a", "b")
    assert says(r, 110.0, "succeeded", "a") == []
    assert says(r, 110.1, "succeeded", "b") == [Finished()]
    assert r.stage is Stage.COMPLETED
    assert r.move(("a", "b", "c"), 110.2) == []
    assert r.stop() == [SendRelease("a"), SendRelease("b")]


@pytest.mark.parametrize("stage", [Stage.WARMING, Stage.DRAINING])
def test_a_job_that_ends_well_in_the_middle_of_a_rescale_is_done(stage):
    r = running("a", "b")
    r.move(("a", "b", "c"), 110.0)
    if stage is Stage.DRAINING:
        says(r, 111.0, "ready", "c")
    assert r.stage is stage
    assert says(r, 112.0, "succeeded", "a") == []
    assert r.drained("b", 1, 112.0) == []
    assert says(r, 112.5, "succeeded", "b") == [Finished()]
    assert set(r.stop()) == {SendRelease("a"), SendRelease("b"), SendRelease("c")}


def test_when_rank_0_is_done_the_others_get_a_moment_before_a_new_round():
    r = running("a", "b")
    r.move(("a", "b", "c"), 110.0)
    says(r, 111.0, "succeeded", "a")
    assert says(r, 112.0, "ready", "c") == []
    assert r.stage is Stage.DRAINING
    assert says(r, 113.0, "succeeded", "b") == [Finished()]


def test_a_node_lost_before_its_worker_was_done_means_another_round():
    r = running("a", "b")
    says(r, 110.0, "succeeded", "a")
    assert r.gone("b", 111.0) == []
    assert r.move(("a",), 112.0) == [SaveRound(2, ("a",)), SendRound("a", 2, 0, 1, None)]
    says(r, 113.0, "running", "a")
    assert says(r, 120.0, "succeeded", "a") == [Finished()]


def test_a_success_of_an_old_round_is_not_the_end():
    r = running("a")
    r.move(("a", "b"), 110.0)
    says(r, 111.0, "ready", "b")
    r.drained("a", 1, 112.0)
    says(r, 113.0, "running", "b")
    assert says(r, 113.0, "succeeded", "a", generation=1) == [SendRound("a", 2, 0, 2, None)]
    assert r.stage is Stage.FORMING


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
    assert r.move(("a",), 111.0) == [SendRelease("b"), Formed(1, ("a",))]
    assert r.stage is Stage.RUNNING


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
    assert r.released("b", 110.0) == [SendAssign("b"), SaveRound(2, ("a",)), SendRound("a", 2, 0, 1, None)]
    assert r.phase("a", Assignment("j1", "failed", 1, (Failure(0, 1, 0.0, CLOSED),)), 110.1) == [SendRound("a", 2, 0, 1, None)]
    assert r.tick(113.0) == [], "it failed because of the one that began anew"
    assert says(r, 114.0, "running", "a") == [Formed(2, ("a",))]
    assert says(r, 115.0, "ready", "b") == [SendDrain("a", 2, 1)]


def test_stop_in_every_stage():
    for steps in range(5):
        r = JobRounds(SETTINGS)
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
    r = JobRounds(SETTINGS)
    r.move(("a",), 0.0)
    says(r, 1.0, "ready", "a")
    assert r.move(("a", "b"), 2.0) == [SendAssign("b")]
    assert r.stage is Stage.FORMING
    assert says(r, 3.0, "ready", "b") == []
    assert says(r, 4.0, "running", "a") == [Formed(1, ("a",)), SendDrain("a", 1, 1)]


def test_fewer_nodes_while_a_round_is_formed_is_a_new_round_at_once():
    r = JobRounds(SETTINGS)
    r.move(("a", "b"), 0.0)
    says(r, 1.0, "ready", "a", "b")
    assert r.move(("b",), 2.0, within_s=5.0) == [SendRelease("a"), SaveRound(2, ("b",)), SendRound("b", 2, 0, 1, None)]


def test_another_target_in_the_middle_of_a_drain_counts_when_it_is_over():
    r = running("a", "b")
    r.move(("a",), 110.0)
    assert r.move(("b", "c"), 111.0) == [SendAssign("c")]
    assert r.stage is Stage.DRAINING
    assert r.drained("a", 1, 112.0) == [SendRelease("a"), SaveRound(2, ("b",)), SendRound("b", 2, 0, 1, None)]
    r.store_up("b", 2, *STORE)
    says(r, 113.0, "ready", "c")
    assert says(r, 114.0, "running", "b") == [Formed(2, ("b",)), SendDrain("b", 2, 2)]


def test_back_to_the_old_target_in_the_middle_of_a_drain_does_not_leave_the_workers_standing():
    r = running("a", "b", low=2)
    r.move(("a", "c"), 110.0, within_s=5.0)
    r.tick(111.5)
    assert r.stage is Stage.DRAINING
    r.drained("a", 1, 112.0)
    assert r.stage is Stage.WARMING
    assert r.move(("a", "b"), 113.0) == [SendRelease("c")]
    assert r.released("b", 114.0) == [SendAssign("b")]
    assert says(r, 115.0, "ready", "b") == [SaveRound(2, ("a", "b")), SendRound("a", 2, 0, 2, None)]


def test_a_rescale_to_where_the_job_is_already_changes_nothing():
    r = running("a", "b")
    assert r.move(("b", "a"), 110.0) == [Formed(1, ("a", "b"))]
    assert r.stage is Stage.RUNNING


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
    assert r.stage is Stage.RUNNING


def test_a_round_lost_on_the_way_is_told_again_when_the_agent_says_where_it_stands():
    r = JobRounds(SETTINGS)
    r.move(("a", "b"), 0.0)
    says(r, 1.0, "ready", "a", "b")
    assert says(r, 2.0, "ready", "a") == [SendRound("a", 1, 0, 2, None)]
    assert says(r, 2.0, "ready", "b") == [], "the store is not up yet"
    r.store_up("a", 1, *STORE)
    assert says(r, 3.0, "ready", "b") == [SendRound("b", 1, 1, 2, STORE)]


# --- after a restart of the daemon ---


def holds(**phases):
    return {node: Assignment("j", phase, generation) for node, (phase, generation) in phases.items()}


def adopt(members, phases, generation=7, low=1):
    r = JobRounds(SETTINGS, min_nodes=low)
    return r, r.adopt(generation, members, phases, 1000.0)


def test_a_whole_round_is_adopted_and_goes_on():
    r, actions = adopt(("a", "b"), holds(a=("running", 7), b=("running", 7)))
    assert actions == [SendDrain("a", 7, 0)], "a drain of before must not leave the workers standing"
    assert (r.stage, r.members, r.generation) == (Stage.RUNNING, ("a", "b"), 7)
    assert r.move(("a",), 1010.0) == [SendDrain("a", 7, 1001)], "a number that no drain of before had"
    assert r.drained("a", 7, 11.0)[:2] == [SendRelease("b"), SaveRound(8, ("a",))]


def test_a_job_that_ended_while_nobody_watched_is_done():
    r, actions = adopt(("a", "b"), holds(a=("succeeded", 7), b=("succeeded", 7)))
    assert (actions, r.stage) == ([Finished()], Stage.COMPLETED)


def test_a_job_that_crashed_while_nobody_watched_broke():
    r, actions = adopt(("a", "b"), holds(a=("running", 7), b=("failed", 7)))
    assert (actions, r.stage) == ([SendDrain("a", 7, 0)], Stage.RUNNING)
    (broke,) = r.tick(1002.0)
    assert "workers failed on b" in broke.sentence


@pytest.mark.parametrize(
    "phases",
    [
        holds(a=("running", 7)),
        holds(a=("running", 7), b=("running", 6)),
        holds(a=("ready", 0), b=("ready", 0)),
        holds(a=("running", 7), b=("starting", 0)),
        holds(a=("failed", 7)),
    ],
    ids=["one-lost", "mixed", "none-in-the-round", "one-begins", "failed-because-of-the-lost-one"],
)
def test_what_is_not_whole_waits_for_a_plan_and_then_forms_a_new_round(phases):
    r, actions = adopt(("a", "b"), phases)
    assert (actions, r.stage) == ([], Stage.IDLE)
    assert r.tick(1100.0) == []
    r.move(tuple(phases), 1101.0)
    says(r, 1102.0, "ready", *phases)
    assert r.stage is Stage.FORMING
    assert r.generation == 8
    assert r.members == tuple(phases)


def test_a_launcher_beyond_the_round_joins_it():
    r, actions = adopt(("a",), holds(a=("running", 7), b=("ready", 0)))
    assert actions == [SendDrain("a", 7, 0), SendDrain("a", 7, 1001)]
    assert r.target == ("a", "b")


def test_workers_of_a_newer_round_than_the_store_knows_are_stopped_and_started_anew():
    r, actions = adopt(("a",), holds(a=("running", 9)))
    assert (actions, r.stage) == ([SendRelease("a")], Stage.IDLE)
    assert r.move(("a",), 1.0) == []
    assert r.released("a", 2.0) == [SendAssign("a")]
    assert says(r, 3.0, "ready", "a") == [SaveRound(8, ("a",)), SendRound("a", 8, 0, 1, None)]


def test_a_round_that_nobody_formed_does_not_count():
    r = JobRounds(SETTINGS)
    r.move(("a",), 0.0)
    assert says(r, 1.0, "running", "a", generation=2**63) == []
    assert says(r, 2.0, "ready", "a") == [SaveRound(1, ("a",)), SendRound("a", 1, 0, 1, None)]


def test_a_job_without_a_round_is_not_running():
    r, actions = adopt((), {}, generation=0)
    assert (actions, r.stage) == ([], Stage.IDLE)


# --- first causes ---


@pytest.mark.parametrize(
    ("failures", "sentence"),
    [
        ([Failure(3, 1, 5.0, "a\nKeyError: 'x'\n")], "Rank 3 exited with code 1. Its last line: KeyError: 'x'"),
        ([Failure(0, -9, 5.0)], "Rank 0 was killed by signal 9."),
        ([Failure(0, 1, 1.0, CLOSED), Failure(1, -9, 2.0)], "Rank 1 was killed by signal 9."),
        ([Failure(0, -15, 1.0, "x"), Failure(1, 1, 2.0, CLOSED)], "Rank 0 was killed by signal 15. Its last line: x"),
        ([Failure(1, 7, 2.0, "later"), Failure(0, 7, 1.0, "sooner")], "Rank 0 exited with code 7. Its last line: sooner"),
    ],
)
def test_the_first_cause_in_one_sentence(failures, sentence):
    assert describe(by_cause(failures)) == sentence
