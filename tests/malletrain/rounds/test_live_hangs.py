"""Live jobs whose workers hang: who is told to give up what, and what counts as a failure."""

from __future__ import annotations

import pytest

from malletrain.protocol.messages import Failure
from malletrain.rounds.interface import (
    Broke,
    NodesRejected,
    RoundStage,
    SendRelease,
    SendRound,
    WorkersRunning,
)
from malletrain.rounds.live import MAX_EXTENSIONS
from tests.malletrain.rounds.live_world import GAVE_UP, RAISED, Live, aborts, of, rounds


def test_workers_that_hang_are_told_to_give_up_and_those_that_cannot_are_started_again():
    live = Live("a", "b")
    assert aborts(live.rounds.give_up()) == {("a", 1), ("b", 1)}
    assert rounds(live.rounds.move(("a", "b"), live.now)) == [("a", "b")]
    live.says("a", "lost", 1)
    assert rounds(live.fails("b", GAVE_UP)) == [("a",)], "a has the state, and waits for nobody"
    assert rounds(live.run()) == [("a", "b")], "b is started again and joins"


@pytest.mark.parametrize("nodes", ["a", "ab"])
def test_that_all_workers_end_of_a_hang_is_no_failure_more_and_what_comes_after_is(nodes):
    live = Live(*nodes)
    live.rounds.give_up()
    live.rounds.move(tuple(nodes), live.now)
    breaks = [of(Broke, live.fails(node, GAVE_UP)) for node in nodes][-1]
    assert [broke.expected for broke in breaks] == [True]
    assert rounds(live.rounds.move(tuple(nodes), live.now)) == [tuple(nodes)]
    assert not of(Broke, live.rounds.tick(live.now + 30.0)), "they are being started again"
    later = Failure(0, 1, 20.0, "ValueError: oops")
    breaks = [of(Broke, live.says(node, "failed", 1, later)) for node in nodes][-1]
    assert [broke.expected for broke in breaks] == [False], "they failed as they came up again"


def test_who_hangs_as_a_round_is_formed_is_told_to_give_up_once_no_step_is_so_long():
    live = Live("a", "b")
    assert rounds(live.rounds.move(("a",), live.now)) == [("a",)]
    for _ in range(MAX_EXTENSIONS - 1):
        live.now += live.rounds.settings.join_s
        assert not live.rounds.tick(live.now), "it may be in a long step"
    live.now += live.rounds.settings.join_s
    actions = live.rounds.tick(live.now)
    assert [broke.expected for broke in of(Broke, actions)] == [False]
    assert ("a", 1) in aborts(actions)
    assert rounds(live.rounds.move(("a",), live.now)) == [("a",)]
    assert [broke.expected for broke in of(Broke, live.fails("a", GAVE_UP))] == [True]


def test_a_failure_that_was_told_is_not_told_again_while_its_worker_is_started():
    live = Live("a", "b")
    live.fails("a", RAISED)
    assert of(Broke, live.fails("b", RAISED))
    live.rounds.move(("a", "b"), live.now)
    live.says("a", "running")
    for _ in range(10):
        live.now += 1.0
        assert not of(Broke, live.rounds.tick(live.now)), "b takes longer than a"


def round_after_a_failure() -> Live:
    """b failed, a went on without it, and the round in which b is started again is being formed."""
    live = Live("a", "b")
    live.fails("b")
    assert rounds(live.run()) == [("a", "b")]
    live.rounds.store_up("a", 3, "host", 1)
    return live


def test_the_others_give_up_the_rounds_with_one_that_hangs_and_not_the_one_without_it():
    live = Live("a", "b", "c", "d")
    assert rounds(live.rounds.move(("a", "b", "c", "d", "e"), live.now)) == []
    assert rounds(live.says("e", "ready", 0)) == [("a", "b", "c", "d", "e")]
    for node in "acde":
        live.says(node, "running", 2)
    for _ in range(MAX_EXTENSIONS):
        live.now += live.rounds.settings.join_s
        actions = live.rounds.tick(live.now)
    assert [a.nodes for a in of(NodesRejected, actions)] == [("b",)]
    assert rounds(actions) == [("a", "c", "d", "e")]
    assert aborts(actions) == {(n, g) for n in "acde" for g in (1, 2)}, "b is in those, not in 3"
    assert not live.rounds.lost_member
    for node in "acde":
        live.says(node, "lost", 2)
    actions = live.run()
    assert [a.generation for a in of(WorkersRunning, actions)] == [3]
    assert of(SendRelease, actions) == [SendRelease("b")]
    assert live.rounds.stage is RoundStage.RUNNING


def test_nobody_gives_up_a_round_that_waits_for_news_of_a_node_that_cannot_be_reached():
    live = Live("a", "b", "c")
    assert rounds(live.rounds.move(("a", "b"), live.now)) == [("a", "b")]
    for _ in range(MAX_EXTENSIONS - 1):
        live.now += live.rounds.settings.join_s
        live.rounds.tick(live.now)
    live.says("b", "running", 2)
    live.rounds.unreachable("b")
    live.now += live.rounds.settings.join_s
    assert not live.rounds.tick(live.now)
    assert not live.rounds.lost_member


def test_who_is_started_again_hears_of_its_round_once_more_where_that_was_lost():
    live = round_after_a_failure()
    assignment = live.rounds.holdings.phases["b"]
    actions = live.rounds.phase("b", assignment, live.now)
    assert [(a.node, a.generation) for a in of(SendRound, actions)] == [("b", 3)]
    actions = live.says("a", "running", 2)
    assert [(a.node, a.generation) for a in of(SendRound, actions)] == [("a", 3)]


def test_who_takes_too_long_to_start_again_is_left_out_and_the_job_goes_on():
    live = round_after_a_failure()
    live.now += live.rounds.settings.join_s
    actions = live.rounds.tick(live.now)
    assert not of(Broke, actions), "a trains well"
    assert [a.nodes for a in of(NodesRejected, actions)] == [("b",)]
    assert rounds(actions) == [("a",)]
    assert of(WorkersRunning, live.run())


def test_a_plan_leaves_alone_the_round_in_which_a_worker_is_started_again():
    live = round_after_a_failure()
    assert not rounds(live.rounds.move(("a", "b"), live.now))
    assert [a.generation for a in of(WorkersRunning, live.run())] == [3]


@pytest.mark.parametrize("nodes", ["ab", "abc"])
def test_workers_that_start_again_because_a_node_was_lost_are_no_failure(nodes):
    """They had ended their script, but what the lost node was writing is missing."""
    live = Live(*nodes)
    lost, *remaining = nodes
    assert rounds(live.rounds.gone(lost, live.now)) == [tuple(remaining)]
    breaks = [of(Broke, live.fails(node, GAVE_UP)) for node in remaining][-1]
    assert [broke.expected for broke in breaks] == [True]
    assert rounds(live.rounds.move(tuple(remaining), live.now)) == [tuple(remaining)]
    live.run()
    breaks = [of(Broke, live.fails(node, GAVE_UP)) for node in remaining][-1]
    assert [broke.expected for broke in breaks] == [False], "of this round nobody was lost"


def test_a_script_that_fails_by_itself_after_a_node_was_lost_is_a_failure():
    live = Live("a", "b")
    live.rounds.gone("a", live.now)
    assert [broke.expected for broke in of(Broke, live.fails("b", RAISED))] == [False]
