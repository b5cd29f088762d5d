"""A node that leaves already, and has to be free earlier than was known."""

import pytest

from malletrain.protocol.messages import Assignment
from malletrain.protocol.phases import AssignmentPhase
from malletrain.rounds.interface import (
    MIN_LIMIT_S,
    RoundSettings,
    RoundStage,
    SaveRound,
    SendRelease,
    SendView,
)
from malletrain.rounds.service import FarmRounds, ServiceRounds
from tests.malletrain.rounds.live_world import Live
from tests.malletrain.rounds.rounds_tables import running

SETTINGS = RoundSettings(warmup_s=60.0, drain_s=10.0, stop_s=1.0)


def serving(kind, *nodes):
    rounds = kind(SETTINGS)
    rounds.move(nodes, 0.0)
    for node in nodes:
        rounds.phase(node, Assignment("job", AssignmentPhase.READY), 0.0)
    return rounds


@pytest.mark.parametrize("kind", [ServiceRounds, FarmRounds])
def test_a_leaver_of_a_service_is_told_of_its_new_limit(kind):
    rounds = serving(kind, "a", "b")
    rounds.move(("a",), 100.0, within_s=10.0)
    assert rounds.next_wakeup() == 100.0 + 0.95 * 8.0
    views = {a.node: a.members for a in rounds.hasten("b", 102.0, 4.0) if isinstance(a, SendView)}
    assert [m.leaves_at for m in views["b"] if m.node == "b"] == [102.0 + 0.95 * 2.0]
    assert SendRelease("b") in rounds.tick(102.0 + 0.95 * 2.0)


@pytest.mark.parametrize("kind", [ServiceRounds, FarmRounds])
def test_nothing_is_hastened_that_stays_or_is_sooner_gone(kind):
    rounds = serving(kind, "a", "b")
    rounds.move(("a",), 100.0, within_s=4.0)
    assert rounds.hasten("a", 101.0, 1.0) == []
    assert rounds.hasten("b", 101.0, 30.0) == []
    assert rounds.next_wakeup() == 100.0 + 0.95 * 2.0


def test_a_drain_in_restart_mode_is_over_earlier():
    rounds = running("a", "b")
    rounds.move(("a",), 110.0, within_s=10.0)
    assert (rounds.stage, rounds.next_wakeup()) == (RoundStage.DRAINING, 116.0)
    assert rounds.hasten("a", 111.0, 2.0) == []
    assert rounds.next_wakeup() == 116.0, "that one stays"
    assert rounds.hasten("b", 111.0, 2.0) == []
    assert rounds.next_wakeup() == pytest.approx(112.2)
    assert rounds.hasten("b", 111.5, 0.0) == []
    assert rounds.next_wakeup() == 111.5 + MIN_LIMIT_S
    assert rounds.tick(111.8)[:2] == [SendRelease("b"), SaveRound(2, ("a",))]
    assert rounds.hasten("b", 112.0, 0.0) == []
    assert rounds.stage is RoundStage.FORMING


def test_the_hand_over_of_a_live_job_is_over_earlier():
    live = Live("a")
    live.rounds.move(("a", "b"), live.now)
    live.says("b", "ready", 0)
    live.rounds.move(("b",), live.now, within_s=6.0)
    assert live.rounds.next_wakeup() == live.now + 2.0
    live.rounds.hasten("a", live.now, 1.5)
    assert live.rounds.next_wakeup() == live.now + 0.5
    live.now += 0.5
    saved = [a.members for a in live.rounds.tick(live.now) if isinstance(a, SaveRound)]
    assert saved == [("b",)]
