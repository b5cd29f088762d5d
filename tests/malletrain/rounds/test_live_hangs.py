"""Live jobs whose workers hang: who is told to give up what, and what counts as a failure."""

from __future__ import annotations

import pytest

from malletrain.protocol.messages import Failure
from malletrain.rounds.actions import Broke
from malletrain.rounds.live import MOST_EXTENSIONS
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
    told = [of(Broke, live.fails(node, GAVE_UP)) for node in nodes][-1]
    assert [broke.known for broke in told] == [True]
    assert rounds(live.rounds.move(tuple(nodes), live.now)) == [tuple(nodes)]
    assert not of(Broke, live.rounds.tick(live.now + 30.0)), "they are being started again"
    later = Failure(0, 1, 20.0, "ValueError: oops")
    told = [of(Broke, live.says(node, "failed", 1, later)) for node in nodes][-1]
    assert [broke.known for broke in told] == [False], "they failed as they came up again"


def test_who_hangs_as_a_round_is_formed_is_told_to_give_up_once_no_step_is_so_long():
    live = Live("a", "b")
    assert rounds(live.rounds.move(("a",), live.now)) == [("a",)]
    for _ in range(MOST_EXTENSIONS - 1):
        live.now += live.rounds.job.settings.join_s
        assert not live.rounds.tick(live.now), "it may be in a long step"
    live.now += live.rounds.job.settings.join_s
    actions = live.rounds.tick(live.now)
    assert [broke.known for broke in of(Broke, actions)] == [False]
    assert ("a", 1) in aborts(actions)
    assert rounds(live.rounds.move(("a",), live.now)) == [("a",)]
    assert [broke.known for broke in of(Broke, live.fails("a", GAVE_UP))] == [True]


def test_a_failure_that_was_told_is_not_told_again_while_its_worker_is_started():
    live = Live("a", "b")
    live.fails("a", RAISED)
    assert of(Broke, live.fails("b", RAISED))
    live.rounds.move(("a", "b"), live.now)
    live.says("a", "running")
    for _ in range(10):
        live.now += 1.0
        assert not of(Broke, live.rounds.tick(live.now)), "b takes longer than a"
