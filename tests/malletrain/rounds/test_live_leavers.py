"""Leavers of a live job: who gives the state, and what becomes of one that is planned again."""

from __future__ import annotations

import pytest

from malletrain.protocol.messages import Failure
from malletrain.rounds.interface import (
    Broke,
    RoundStage,
    SendAssign,
    SendDrain,
    SendRelease,
    WorkersRunning,
)
from malletrain.rounds.live import ROUND_ENTRY_S
from tests.malletrain.rounds.live_world import (
    KILLED,
    RAISED,
    Live,
    aborts,
    of,
    rounds,
)


def alone_with_a_leaver(*, lost: bool = False) -> tuple[Live, list]:
    """b is told to leave, and a fails before it has left b's group."""
    live = Live("a", "b")
    actions = live.rounds.move(("a",), live.now, 20.0)
    assert rounds(actions) == [("a",)]
    assert not of(SendRelease, actions), "b finishes the step with a"
    actions = live.rounds.gone("a", live.now) if lost else live.says("a", "exited", 1)
    live.says("b", "lost", 1)
    return live, actions


def test_who_leaves_gives_the_state_where_nobody_who_stays_has_it_any_more():
    live, _ = alone_with_a_leaver()
    actions = live.rounds.move(("a",), live.now, 15.0)
    assert [a.node for a in of(SendAssign, actions)] == ["a"]
    actions = live.says("a", "ready", 0)
    assert rounds(actions) == [("b", "a")], "b has it, and comes first"
    actions = live.run()
    assert rounds(actions) == [("a",)], "a has it, and b goes"
    assert [a.node for a in of(SendRelease, live.run())] == ["b"]
    assert live.rounds.stage is RoundStage.RUNNING


def test_a_leaver_gives_the_state_to_another_node_where_the_first_is_lost():
    live, _ = alone_with_a_leaver(lost=True)
    actions = live.rounds.move(("c",), live.now, 15.0)
    assert [a.node for a in of(SendAssign, actions)] == ["c"]
    assert rounds(live.says("c", "ready", 0)) == [("b", "c")]
    assert rounds(live.run()) == [("c",)]


def test_a_leaver_gives_the_state_where_two_stayed_and_both_fail_one_after_the_other():
    live = Live("a", "b", "c")
    assert rounds(live.rounds.move(("a", "b"), live.now, 20.0)) == [("a", "b")]
    actions = live.says("a", "exited", 1)
    assert rounds(actions) == [("b",)], "b goes on alone"
    assert not of(SendRelease, actions), "c is the only other one that has the state"
    live.says("b", "exited", 1)
    live.says("c", "lost", 1)
    live.rounds.move(("a", "b"), live.now, 15.0)
    live.says("a", "ready", 0)
    assert rounds(live.says("b", "ready", 0)) == [("c", "a", "b")]


def planned_again(phase: str, *failures: Failure) -> tuple[Live, list]:
    """b goes on and a leaves; before the round of b runs, b is taken, and a is planned again."""
    live = Live("a", "b")
    assert rounds(live.rounds.move(("b",), live.now)) == [("b",)]
    live.says("a", phase, 1, *failures)
    return live, live.rounds.move(("a",), live.now, 30.0)


@pytest.mark.parametrize("phase", ["running", "lost"])
def test_a_leaver_that_is_planned_again_goes_on_with_its_state(phase):
    live, actions = planned_again(phase)
    assert rounds(actions) == [("a",)]
    assert not of(SendRelease, actions), "b may have to give the state if a fails"
    assert aborts(actions) == {("b", 2)}, "b would train on alone in its round"
    assert live.run() == [WorkersRunning(3, ("a",)), SendRelease("b")]


def test_the_node_whose_round_was_aborted_gives_the_state_if_the_leaver_fails():
    live, _ = planned_again("running")
    assert live.says("b", "lost", 2) == []  # its worker waits
    live.says("a", "failed", 1, RAISED)
    assert rounds(live.rounds.move(("a",), live.now)) == [("b", "a")]


@pytest.mark.parametrize(
    ("phase", "failures"), [("failed", (KILLED,)), ("exited", (KILLED,)), ("exited", ())]
)
def test_a_leaver_that_is_planned_again_without_its_state_is_started_again(phase, failures):
    live, actions = planned_again(phase, *failures)
    assert actions == [SendRelease("a")]
    assert live.rounds.released("a", live.now) == [SendAssign("a")]
    live.run()
    assert of(SendDrain, live.says("a", "ready", 0)), "b has the state"
    assert rounds(live.rounds.drained("b", 2, live.now)) == [("a",)]


def test_a_leaver_whose_group_went_on_without_it_is_started_again_when_it_is_planned_again():
    live = Live("a", "b")
    live.rounds.move(("b",), live.now)
    live.rounds.move(("c",), live.now)
    assert SendRelease("a") in live.run(), "b trains while c starts"
    assert of(SendDrain, live.says("c", "ready", 0))
    assert live.rounds.move(("a",), live.now) == [SendRelease("c")]
    assert not rounds(live.rounds.drained("b", 2, live.now)), "its state is older than b's"
    assert live.rounds.released("a", live.now) == [SendAssign("a")]
    actions = live.says("a", "ready", 0)
    assert (rounds(actions), aborts(actions)) == ([("a",)], set()), "b has trained in its round"


def planned_with_a_joiner(*nodes: str) -> Live:
    """a leaves; before the round of the others runs, a is planned again, together with d."""
    live = Live("a", *nodes)
    assert rounds(live.rounds.move(nodes, live.now)) == [nodes]
    assert live.rounds.move(("a", "d"), live.now) == [SendAssign("d")]
    return live


def test_a_leaver_that_is_planned_again_and_not_in_the_next_plan_still_gives_the_state():
    live = planned_with_a_joiner("b")
    assert live.rounds.move(("d",), live.now) == []
    assert rounds(live.says("d", "ready", 0)) == [("a", "d")]
    assert rounds(live.run()) == [("d",)]


def test_a_leaver_that_is_planned_again_is_started_again_once_the_newest_round_runs():
    live = planned_with_a_joiner("b")
    live.now += 5.0
    assert SendRelease("a") in live.run(), "b has a newer state"
    assert live.rounds.next_wakeup() == live.now + live.rounds.settings.warmup_s
    assert live.rounds.released("a", live.now) == [SendAssign("a")]
    assert not of(SendDrain, live.says("d", "ready", 0)), "a is waited for"
    assert [drain.node for drain in of(SendDrain, live.says("a", "ready", 0))] == ["b"]


def test_the_state_of_a_leaver_is_not_used_where_a_newer_round_has_run_and_broke():
    live = Live("a", "b", "c")
    live.rounds.move(("b", "c"), live.now)
    live.rounds.move(("d",), live.now)
    assert live.run() == [SendRelease("a")]
    live.says("b", "lost", 2)
    assert live.rounds.move(("a",), live.now) == [SendRelease("d")]
    assert live.rounds.released("a", live.now) == [SendAssign("a")]


def test_a_leaver_that_loses_its_state_while_others_start_is_started_again():
    live = planned_with_a_joiner("b")
    live.says("a", "failed", 1, KILLED)
    live.now += 5.0
    assert live.says("d", "ready", 0) == [SendRelease("a")]
    assert live.rounds.next_wakeup() == live.now + live.rounds.settings.warmup_s
    assert live.rounds.released("a", live.now) == [SendAssign("a")]


def test_a_leaver_that_is_planned_again_goes_on_at_once_where_the_others_of_its_group_are_lost():
    live = planned_with_a_joiner("b")
    actions = live.rounds.gone("b", live.now)
    assert rounds(actions) == [("a",)]
    assert aborts(actions) == {("a", 1), ("a", 2)}


def test_a_worker_that_is_killed_uses_up_no_try_where_a_leaver_planned_again_has_the_state():
    live = planned_with_a_joiner("b")
    actions = live.fails("b")
    assert rounds(actions) == [("a",)]
    assert aborts(actions) == {("a", 1), ("a", 2)}
    live.now += 30.0
    assert not of(Broke, live.rounds.tick(live.now))
    live.run()
    assert rounds(live.says("d", "ready", 0)) == [("a", "d")]


def test_a_script_that_fails_by_itself_is_told_once_where_a_leaver_planned_again_has_the_state():
    live = planned_with_a_joiner("b")
    assert len(of(Broke, live.fails("b", RAISED))) == 1
    live.now += 30.0
    assert not of(Broke, live.rounds.tick(live.now))
    assert rounds(live.rounds.move(("a",), live.now)) == [("a",)]


def test_a_leaver_planned_again_that_is_not_enough_alone_keeps_its_state_after_a_failure():
    live = Live("a", "b", min_nodes=2)
    live.rounds.min_nodes = 1
    live.rounds.move(("b",), live.now)
    live.rounds.min_nodes = 2
    live.rounds.move(("a", "d"), live.now)
    assert not of(SendRelease, live.fails("b"))
    assert rounds(live.says("d", "ready", 0)) == [("a", "d")]


@pytest.mark.parametrize("how", ["gone", "failed", "lost"])
def test_a_leaver_planned_again_that_is_not_enough_alone_is_the_only_one_with_the_state(how):
    live = Live("a", "b", min_nodes=2)
    live.rounds.min_nodes = 1
    live.rounds.move(("b",), live.now)
    live.rounds.min_nodes = 2
    live.rounds.move(("a", "d"), live.now)
    if how == "gone":
        actions = live.rounds.gone("b", live.now)
    elif how == "failed":
        actions = live.fails("b")
    else:
        live.says("b", "lost", 2)
        live.now += live.rounds.settings.failure_grace_s
        actions = live.rounds.tick(live.now)
    assert not of(SendRelease, actions)
    assert aborts(actions) >= {("a", 1), ("a", 2)}, "its step has lost a peer"
    live.now += 10.0
    assert not of(Broke, live.rounds.tick(live.now)), "d is being started"
    live.says("a", "lost", 1)
    assert rounds(live.says("d", "ready", 0)) == [("a", "d")]


def test_a_joiner_that_is_killed_uses_up_no_try_where_a_leaver_planned_again_has_the_state():
    live = Live("a", "b", "c")
    live.rounds.move(("b", "d"), live.now)
    assert rounds(live.says("d", "ready", 0)) == [("b", "d")]
    assert live.rounds.move(("a", "d"), live.now) == [], "b and d complete their round first"
    assert rounds(live.says("d", "failed", 0, KILLED)) == [("a",)]
    live.now += 30.0
    assert not of(Broke, live.rounds.tick(live.now))
    assert rounds(live.run()) == [("a", "d")]


def without_the_member_that_stays(how: str) -> tuple[Live, list]:
    """b is not planned any more, and a is lost while d starts."""
    live = Live("a", "b")
    assert live.rounds.move(("a", "d"), live.now) == [SendAssign("d")]
    return live, live.rounds.gone("a", live.now) if how == "gone" else live.fails("a")


@pytest.mark.parametrize(("how", "nodes"), [("gone", ("b", "d")), ("failed", ("b", "a", "d"))])
def test_a_member_that_is_not_planned_any_more_gives_the_state_if_no_other_has_it(how, nodes):
    live, actions = without_the_member_that_stays(how)
    assert aborts(actions) == {("b", 1)}, "its step has lost a peer"
    live.says("b", "lost", 1)
    for _ in range(10):
        live.now += 1.0
        actions += live.rounds.tick(live.now)
    assert not of(Broke, actions), "b has the state, and d is being started"
    assert not of(SendRelease, actions)
    actions = live.says("d", "ready", 0)
    assert rounds(actions) == [nodes]
    assert rounds(live.run()) == [nodes[1:]]
    assert of(SendRelease, live.run()) == [SendRelease("b")]


def test_a_script_that_raises_is_told_once_where_a_member_without_a_plan_has_the_state():
    live = Live("a", "b")
    live.rounds.move(("a", "d"), live.now)
    assert [broke.nodes for broke in of(Broke, live.fails("a", RAISED))] == [("a",)]
    live.now += 30.0
    assert not of(Broke, live.rounds.tick(live.now))
    assert live.rounds.move(("a", "d"), live.now) == []
    assert rounds(live.says("d", "ready", 0)) == [("b", "a", "d")]


@pytest.mark.parametrize("how", ["gone", "failed"])
@pytest.mark.parametrize("target", [("d",), ("d", "e")])
def test_a_node_that_is_taken_does_not_wait_for_joiners_to_give_them_the_state(how, target):
    live = Live("a", "b")
    live.rounds.move(target, live.now, 20.0)
    actions = live.rounds.gone("a", live.now) if how == "gone" else live.fails("a")
    actions += live.says("b", "lost", 1)
    if len(target) > 1:
        actions += live.says("d", "ready", 0)
    live.now += live.rounds.settings.joiner_wait_s(20.0)
    actions += live.rounds.tick(live.now)
    assert SendRelease("b") in actions, "the last of the target has not started"
    assert rounds(actions) == ([("d",)] if len(target) > 1 else [])


def test_a_failure_is_told_where_the_plan_has_too_few_nodes_for_a_round():
    live = Live("a", "b", min_nodes=2)
    live.rounds.move(("a",), live.now)
    actions = live.fails("a")
    live.now += live.rounds.settings.failure_grace_s
    actions += live.rounds.tick(live.now)
    assert [broke.nodes for broke in of(Broke, actions)] == [("a",)], "no round starts a again"


def test_a_script_that_raises_on_all_nodes_is_told_once_where_all_nodes_are_replaced():
    live = Live("a", "b", "c", "d")
    actions = live.rounds.move(("e", "f"), live.now)
    for node in "abcd":
        actions += live.fails(node, RAISED)
    live.now += 30.0
    actions += live.rounds.tick(live.now)
    assert [broke.nodes for broke in of(Broke, actions)] == [("a",)]


@pytest.mark.parametrize(("phase", "nodes"), [("lost", ("b", "d")), ("finishing", ("d",))])
def test_the_last_code_of_a_script_is_not_waited_for_to_give_the_state(phase, nodes):
    live = Live("a", "b")
    live.rounds.move(("a", "d"), live.now)
    live.says("b", phase, 1)
    live.rounds.gone("a", live.now)
    live.rounds.move(("d",), live.now)
    assert rounds(live.says("d", "ready", 0)) == [nodes]


def test_a_failure_is_told_where_the_last_one_with_the_state_fails_too():
    live, actions = without_the_member_that_stays("failed")
    actions += live.fails("b")
    live.now += live.rounds.settings.failure_grace_s
    assert [broke.nodes for broke in of(Broke, actions + live.rounds.tick(live.now))] == [("b",)]
    live.rounds.move(("a", "d"), live.now)
    assert rounds(live.says("d", "ready", 0)) == [("a", "d")], "from the snapshot"


def test_a_member_that_has_saved_its_state_for_the_next_round_does_not_give_it_too():
    live = Live("a", "b")
    live.rounds.move(("d",), live.now)
    assert of(SendDrain, live.says("d", "ready", 0))
    assert rounds(live.rounds.gone("b", live.now)) == [("d",)], "a waits to be stopped"


def test_a_round_does_not_wait_for_a_node_that_is_lost_before_it_gave_the_state():
    live, _ = alone_with_a_leaver()
    live.rounds.move(("a",), live.now, 15.0)
    assert rounds(live.says("a", "ready", 0)) == [("b", "a")]
    live.rounds.gone("b", live.now)
    assert live.rounds.next_wakeup() == live.now
    assert rounds(live.rounds.tick(live.now)) == [("a",)]


def test_leavers_do_not_stay_until_the_end_of_a_script_that_is_finishing():
    live = Live("a", "b")
    live.rounds.move(("b",), live.now)
    live.rounds.move(("d",), live.now)
    assert SendRelease("a") in live.says("b", "finishing", 2), "the report that b runs was lost"
    assert live.rounds.stage is RoundStage.FINISHING


def test_a_leaver_whose_agent_has_nothing_of_the_job_is_started_again_when_it_is_planned_again():
    live = Live("a", "b")
    live.rounds.move(("b",), live.now)
    assert live.rounds.released("a", live.now) == []
    assert live.rounds.move(("a",), live.now) == [SendAssign("a")]
    assert SendRelease("b") in live.says("a", "ready", 0)
    assert (live.rounds.generation, live.rounds.members) == (3, ("a",))


def test_a_leaver_that_is_to_give_the_state_and_is_planned_again_is_a_member_once():
    live = Live("a", "b", "c", min_nodes=2)
    live.rounds.move(("b", "c"), live.now)
    live.rounds.move(("d", "e"), live.now, 5.0)
    live.now += live.rounds.settings.joiner_wait_s(5.0)
    assert not rounds(live.rounds.tick(live.now)), "neither d nor e has started"
    live.rounds.move(("a", "d"), live.now)
    assert rounds(live.says("d", "ready", 0)) == [("a", "d")]


def test_all_rounds_that_have_only_leavers_are_aborted():
    live = Live("a", "b", "c")
    live.rounds.move(("b", "c"), live.now)
    live.rounds.move(("c",), live.now)
    live.now += ROUND_ENTRY_S
    assert rounds(live.rounds.tick(live.now)) == [("c",)]
    actions = live.rounds.move(("a",), live.now)
    assert rounds(actions) == [("a",)]
    assert aborts(actions) == {("b", 2), ("c", 2), ("c", 3)}


def test_a_leaver_goes_on_alone_where_all_others_are_lost():
    live = Live("a", "b")
    live.rounds.move(("b",), live.now)
    live.rounds.gone("b", live.now)
    assert rounds(live.rounds.move(("a",), live.now)) == [("a",)]


def test_a_leaver_is_let_go_when_those_that_are_left_after_a_failure_have_a_round():
    live = Live("a", "b", "c")
    live.rounds.move(("a", "b"), live.now, 20.0)
    live.says("a", "exited", 1)
    assert SendRelease("c") in live.run()


@pytest.mark.parametrize("how", ["gone", "failed", "unreachable"])
def test_a_leaver_that_has_the_state_no_more_is_not_waited_for(how):
    live, _ = alone_with_a_leaver()
    if how == "gone":
        live.rounds.gone("b", live.now)
    elif how == "failed":
        live.says("b", "failed", 1, KILLED)
    else:
        live.rounds.unreachable("b")
    live.rounds.move(("a",), live.now, 15.0)
    assert rounds(live.says("a", "ready", 0)) == [("a",)]


def test_a_job_that_lets_go_of_all_its_nodes_takes_none_back():
    live, _ = alone_with_a_leaver()
    actions = live.rounds.move((), live.now, 15.0)
    assert not rounds(actions)
    assert {a.node for a in of(SendRelease, actions)} == {"a", "b"}, "b is not waited for either"
    assert live.rounds.members == ()
