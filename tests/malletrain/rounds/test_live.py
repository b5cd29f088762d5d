"""The rounds of a live job: who goes on when somebody is lost, who is told to give up which round,
who is waited for.
"""

from __future__ import annotations

import pytest

from malletrain.protocol.messages import Failure
from malletrain.rounds.holdings import MAX_RESTARTS
from malletrain.rounds.interface import (
    Broke,
    NodesRejected,
    RoundStage,
    SendAssign,
    SendDrain,
    SendRelease,
    WorkersRunning,
)
from malletrain.rounds.live import MAX_FAILED_JOINS, ROUND_ENTRY_S
from tests.malletrain.rounds.live_world import (
    GAVE_UP,
    KILLED,
    LOST_PEER,
    RAISED,
    Live,
    aborts,
    of,
    rounds,
)


def test_those_left_go_on_without_waiting_for_the_worker_that_failed():
    live = Live("a", "b", "c")
    assert live.rounds.stage is RoundStage.RUNNING
    actions = live.fails("b")
    assert aborts(actions) == {("a", 1), ("c", 1)}
    assert rounds(actions) == [("a", "c")]
    actions = live.run()
    assert len(of(WorkersRunning, actions)) == 1
    assert rounds(actions) == [("a", "c", "b")], (
        "its worker is started and joins while the others train"
    )
    assert not aborts(actions)
    assert of(WorkersRunning, live.run())
    assert live.rounds.members == ("a", "c", "b")


def test_a_lost_node_in_the_group_breaks_it_and_a_lost_joiner_does_not():
    live = Live("a", "b")
    live.rounds.move(("a", "b", "c"), live.now)
    live.says("c", "ready", 0)
    assert live.rounds.members == ("a", "b", "c")
    assert live.rounds.generation == 2
    actions = live.rounds.gone("c", live.now)
    assert aborts(actions) == {("a", 2), ("b", 2)}, (
        "round 1, in which a and b train, is not concerned"
    )
    assert rounds(actions) == [("a", "b")]
    actions = live.rounds.gone("b", live.now)
    assert {("a", 1), ("a", 2), ("a", 3)} == aborts(actions)
    assert rounds(actions) == [("a",)]


def test_workers_that_get_another_layout_save_first_and_are_all_started_again():
    live = Live("a", "b")
    live.rounds.outdate()
    actions = live.rounds.move(("a", "b"), live.now)
    assert [drain.node for drain in of(SendDrain, actions)] == ["a"]
    assert live.rounds.stage is RoundStage.DRAINING
    actions = live.rounds.drained("a", 1, live.now)
    assert rounds(actions) == [("a", "b")]
    live.says("a", "ready", 0)
    live.says("b", "ready", 0)
    assert (live.rounds.generation, live.rounds.stage) == (2, RoundStage.FORMING)
    assert of(WorkersRunning, live.run())
    assert not live.rounds.outdated
    assert rounds(live.rounds.move(("a",), live.now)) == [("a",)]  # as ever, without a snapshot


def test_a_node_that_goes_while_a_round_is_formed_hands_its_state_over_in_it():
    """The only one that holds the state is wanted back, and who is to stay has none yet: found by
    a simulated day (docs/simulation-testing.md).
    """
    live = Live("a")
    live.rounds.move(("a", "b"), live.now)
    assert rounds(live.says("b", "ready", 0)) == [("a", "b")]
    assert not live.rounds.move(("b",), live.now, within_s=6.0)
    actions = live.run()
    assert of(WorkersRunning, actions)
    assert rounds(actions) == [("b",)]
    assert of(WorkersRunning, live.run())
    assert live.rounds.members == ("b",)


def test_a_round_that_hands_the_state_over_is_not_waited_for_for_long():
    live = Live("a")
    live.rounds.move(("a", "b"), live.now)
    live.says("b", "ready", 0)
    live.rounds.move(("b",), live.now, within_s=6.0)
    assert not live.rounds.tick(live.now + 1.9)
    live.now += 2.0
    assert live.rounds.next_wakeup() == live.now
    assert rounds(live.rounds.tick(live.now)) == [("b",)]


def test_a_second_shorter_notice_shortens_the_wait_for_the_state():
    live = Live("a")
    live.rounds.move(("a", "b"), live.now)
    live.says("b", "ready", 0)
    live.rounds.move(("b",), live.now, within_s=6.0)
    live.now += 0.5
    live.rounds.move(("b",), live.now, within_s=1.5)
    assert live.rounds.next_wakeup() == live.now + 0.5
    live.now += 0.5
    assert rounds(live.rounds.tick(live.now)) == [("b",)]


def test_joiners_get_no_more_time_after_a_wait_for_the_state_than_the_node_that_goes_has():
    live = Live("a")
    live.rounds.move(("a", "b"), live.now)
    live.says("b", "ready", 0)
    live.rounds.move(("b", "c"), live.now, within_s=6.0)
    live.now += 2.0
    assert not rounds(live.rounds.tick(live.now)), "c is waited for"
    live.now += live.rounds.settings.joiner_grace_s
    assert rounds(live.rounds.tick(live.now)) == [("b",)]


def test_a_wait_for_joiners_that_is_over_is_not_that_of_a_later_notice():
    live = Live("a")
    live.rounds.move(("a", "b"), live.now)
    live.says("b", "ready", 0)
    live.rounds.move(("b", "c"), live.now, within_s=30.0)
    live.now += live.rounds.settings.joiner_grace_s + 1.0
    live.rounds.move(("b", "d"), live.now, within_s=28.0)
    assert not rounds(live.run()), "d may come up now"
    assert rounds(live.says("d", "ready", 0)) == [("b", "d")]


def test_a_joiner_may_fail_a_few_times_before_its_node_is_rejected():
    live = Live("a", "b")
    live.rounds.move(("a", "b", "c"), live.now)
    live.says("c", "ready", 0)
    for attempt in range(1, MAX_FAILED_JOINS + 1):
        before = live.rounds.generation
        actions = live.says("c", "failed", 0, KILLED)
        assert rounds(actions) == [("a", "b")]
        assert live.rounds.generation == before + 1, (
            "one round takes the place of the one that came to nothing"
        )
        assert bool(of(NodesRejected, actions)) == (attempt == MAX_FAILED_JOINS)
        actions = live.run()
        assert rounds(actions) == ([("a", "b", "c")] if attempt < MAX_FAILED_JOINS else [])
        if attempt < MAX_FAILED_JOINS:
            live.says("c", "ready", 0)  # started again for the round


def without_its_launcher() -> Live:
    """The launcher on c was killed, and the others train without it."""
    live = Live("a", "b", "c")
    actions = live.says("c", "exited", 1, KILLED)
    assert rounds(actions) == [("a", "b")]
    assert not of(NodesRejected, actions)
    assert not of(Broke, actions)
    return live


def test_a_launcher_that_ended_in_a_round_is_started_again_while_the_others_train():
    live = without_its_launcher()
    actions = live.run()
    assert of(SendAssign, actions) == [SendAssign("c")]
    assert not of(NodesRejected, actions)
    assert live.rounds.whole()
    assert live.rounds.next_wakeup() == live.now + live.rounds.settings.warmup_s
    assert rounds(live.says("c", "ready", 0)) == [("a", "b", "c")]
    assert of(WorkersRunning, live.run())


def test_a_node_that_is_lost_after_its_launcher_had_ended_is_not_rejected():
    """Its processes were killed one after another, the agent last."""
    live = without_its_launcher()
    live.run()
    live.now += 3.0
    actions = live.rounds.gone("c", live.now)
    assert actions == [WorkersRunning(2, ("a", "b"))]
    assert live.rounds.stage is RoundStage.RUNNING
    assert live.rounds.next_wakeup() is None


def test_a_node_is_rejected_when_its_launcher_has_ended_in_too_many_rounds():
    live = Live("a", "b", "c")
    for number in range(1, MAX_RESTARTS + 2):
        assert live.rounds.members == ("a", "b", "c")
        live.says("c", "exited", live.rounds.generation, KILLED)
        actions = live.run()
        assert bool(of(SendAssign, actions)) == (number <= MAX_RESTARTS)
        assert bool(of(NodesRejected, actions)) == (number > MAX_RESTARTS)
        if number <= MAX_RESTARTS:
            live.says("c", "ready", 0)
            live.run()
    assert of(NodesRejected, actions) == [
        NodesRejected(("c",), "the launcher ended there again and again")
    ]
    assert live.rounds.stage is RoundStage.RUNNING
    assert live.rounds.target == ("a", "b")
    live.rounds.gone("c", live.now)
    live.rounds.move(("a", "b", "c"), live.now)
    live.says("c", "ready", 0)
    live.run()
    live.says("c", "exited", live.rounds.generation, KILLED)
    assert of(SendAssign, live.run()), "what was before it was lost does not count"


def test_repeated_reports_of_one_end_start_a_launcher_again_and_do_not_reject_its_node():
    """The connection ended each time before the node heard that it has to start it."""
    live = without_its_launcher()
    live.run()
    for _ in range(MAX_RESTARTS + 1):
        assert live.says("c", "exited", 1, KILLED) == [SendAssign("c")]
    assert rounds(live.says("c", "ready", 0)) == [("a", "b", "c")]


def test_a_launcher_that_ends_before_its_first_round_has_its_node_rejected_at_once():
    live = Live("a", "b")
    live.rounds.move(("a", "b", "c"), live.now)
    actions = live.says("c", "exited", 0)
    assert of(NodesRejected, actions) == [NodesRejected(("c",), "the launcher ended there at once")]
    live = without_its_launcher()
    live.run()
    assert of(NodesRejected, live.says("c", "exited", 0)), "it was started again, and ended at once"


def test_a_launcher_that_ends_while_a_joiner_is_awaited_does_not_stop_the_others():
    live = Live("a", "b", "c")
    live.rounds.move(("a", "b", "c", "d"), live.now)
    live.now += 1.0
    actions = live.says("c", "exited", 1, KILLED)
    assert of(SendAssign, actions) == [SendAssign("c")]
    assert aborts(actions) == {("a", 1), ("b", 1)}
    assert rounds(actions) == [("a", "b")], "the others wait for nobody"
    assert not of(NodesRejected, live.run())
    live.says("c", "ready", 0)
    assert rounds(live.says("d", "ready", 0)) == [("a", "b", "c", "d")]


def test_a_launcher_that_ends_while_another_node_is_taken_is_started_again():
    """The plan without c was made while the round without the failed worker on a was formed."""
    live = Live("a", "b", "c")
    live.fails("a")
    live.rounds.move(("a", "b"), live.now, 30.0)
    live.says("a", "exited", 1, KILLED)
    actions = live.run()
    assert not of(NodesRejected, actions)
    assert of(SendAssign, actions) == [SendAssign("a")]
    assert rounds(actions) == [("b",)], "the round does not wait, because c is taken"
    live.run()
    assert rounds(live.says("a", "ready", 0)) == [("b", "a")]


def test_a_group_that_broke_by_itself_is_formed_anew_after_a_moment():
    live = Live("a", "b")
    assert not live.says("a", "lost")
    due = live.rounds.next_wakeup()
    assert due == live.now + live.rounds.settings.failure_grace_s
    live.now = due
    actions = live.rounds.tick(live.now)
    assert aborts(actions) == {("a", 1), ("b", 1)}
    assert rounds(actions) == [("a", "b")]
    assert live.rounds.next_wakeup() != due
    assert of(WorkersRunning, live.run())


def test_nobody_waits_for_a_node_that_cannot_be_reached():
    live = Live("a", "b", "c")
    live.rounds.unreachable("b")
    actions = live.says("a", "lost")
    assert aborts(actions) == {("a", 1), ("c", 1)}
    assert rounds(actions) == [("a", "c")]
    live.run()
    assert live.rounds.members == ("a", "c")
    live.rounds.reachable("b")  # it was only its connection: it joins again
    assert rounds(live.says("b", "lost", 1)) == [("a", "c", "b")]


@pytest.mark.parametrize(
    ("failure", "counts"), [(KILLED, False), (RAISED, True), (LOST_PEER, False), (GAVE_UP, False)]
)
def test_a_script_that_fails_by_itself_uses_up_a_try_while_the_others_go_on(failure, counts):
    live = Live("a", "b", "c")
    actions = live.fails("b", failure)
    assert [a.nodes for a in of(Broke, actions)] == ([("b",)] if counts else [])
    assert rounds(actions) == [("a", "c")], "b is no member any more, and its rank was not 0"
    assert live.rounds.stage is RoundStage.FORMING


@pytest.mark.parametrize("over", [True, False])
def test_the_others_go_on_at_once_and_blame_nobody_while_the_node_is_doubted(over):
    live = Live("a", "b")
    live.rounds.doubt("b", False)
    actions = live.fails("b", RAISED)
    assert rounds(actions) == [("a",)]
    assert not of(Broke, actions)
    if over:
        assert of(Broke, live.rounds.doubt("b", True)), "it was the script"
    else:
        assert not of(Broke, live.rounds.gone("b", live.now))
    assert not of(Broke, live.rounds.doubt("b", True)), "it is told once"


def test_leavers_are_released_when_the_others_have_left_the_old_group():
    live = Live("a", "b", "c")
    actions = live.rounds.move(("a", "b"), live.now)
    assert rounds(actions) == [("a", "b")]
    assert not of(SendRelease, actions)
    assert [a.node for a in of(SendRelease, live.run())] == ["c"]


def test_too_few_survivors_wait_for_a_plan():
    live = Live("a", "b", min_nodes=2)
    actions = live.rounds.gone("b", live.now)
    assert aborts(actions) == {("a", 1)}, "nobody waits in the broken group"
    assert not rounds(actions)


@pytest.mark.parametrize(
    ("phase", "failures", "sentence"),
    [
        ("failed", [KILLED], "Rank 0 was killed by signal 9; often the node ran out of memory."),
        ("failed", [RAISED], "Rank 0 exited with code 1. Its last line: ValueError: oops"),
        ("exited", [], "The launcher ended on b."),
        ("exited", [KILLED], "Rank 0 was killed by signal 9; often the node ran out of memory."),
    ],
)
@pytest.mark.parametrize("heard_first", [True, False])
def test_a_failure_is_told_once_where_those_left_are_too_few(
    phase, failures, sentence, heard_first
):
    """Nobody was lost, so no plan follows by itself: untold, the job would wait for ever."""
    live = Live("a", "b", min_nodes=2)
    if heard_first:
        live.says("a", "lost")
    actions = live.says("b", phase, 1, *failures)
    if not heard_first:
        live.says("a", "lost")
    for _ in range(100):
        live.now += 1.0
        actions += live.rounds.tick(live.now)
    assert [a.sentence for a in of(Broke, actions)] == [sentence]
    live.rounds.move(("a", "b"), live.now)
    if phase == "exited":
        live.says("b", "ready", 0)
    actions = live.rounds.move(("a", "b"), live.now + 1.0)
    assert live.rounds.members == ("a", "b")
    live.run()
    assert live.rounds.stage is RoundStage.RUNNING


def test_a_round_is_completed_before_one_leaves_that_holds_state():
    """The others may hold other parts of it: what it has is handed over at the next change."""
    live = Live("a", "b")
    live.rounds.move(("a", "b", "c"), live.now)
    assert rounds(live.says("c", "ready", 0)) == [("a", "b", "c")]
    assert live.rounds.move(("a", "c"), live.now, 60.0) == []
    actions = live.run()
    assert rounds(actions) == [("a", "c")]
    assert of(SendRelease, actions) == [], "it finishes its step with the others first"
    assert of(SendRelease, live.run()) == [SendRelease("b")]


def test_a_round_that_is_not_entered_soon_does_not_keep_a_node_that_is_wanted():
    live = Live("a", "b")
    live.rounds.move(("a", "b", "c"), live.now)
    live.says("c", "ready", 0)
    live.rounds.move(("a", "c"), live.now, 60.0)
    live.now += ROUND_ENTRY_S
    actions = live.rounds.tick(live.now)
    assert rounds(actions) == [("a", "c")]
    assert of(SendRelease, actions) == [], "it finishes its step with the others first"
    assert of(SendRelease, live.run()) == [SendRelease("b")]


def test_a_joiner_that_leaves_before_it_has_joined_is_not_waited_for():
    live = Live("a", "b")
    live.rounds.move(("a", "b", "c"), live.now)
    live.says("c", "ready", 0)
    actions = live.rounds.move(("a", "b"), live.now, 60.0)
    assert rounds(actions) == [("a", "b")]


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
