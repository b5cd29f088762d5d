"""The rounds of a live job: who goes on when somebody is lost, who is told to give up which round,
who is waited for.
"""

from __future__ import annotations

import pytest

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
