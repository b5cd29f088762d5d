"""A planned change waits for the code after the steps of an epoch; a node that goes does not."""

from __future__ import annotations

from malletrain.rounds.interface import RoundStage, SendDrain, SendRelease
from tests.malletrain.rounds.rounds_tables import SETTINGS, running, says


def test_a_planned_change_waits_for_the_code_after_an_epoch():
    r = running("a", "b")
    assert says(r, 110.0, "between-epochs", "a") == []
    assert (r.between_epochs, r.finishing) == (True, False)
    assert r.move(("a",), 111.0) == [SendDrain("a", 1, 1)]
    for _ in range(3):  # however long it takes
        assert r.tick(r.next_wakeup()) == []
        assert r.stage is RoundStage.DRAINING
    assert SendRelease("b") in r.drained("a", 1, 1000.0)
    assert r.stage is RoundStage.FORMING


def test_one_that_was_asked_for_before_waits_too():
    r = running("a", "b")
    assert r.move(("a",), 110.0) == [SendDrain("a", 1, 1)]
    assert says(r, 111.0, "between-epochs", "a", "b") == []
    assert r.tick(r.next_wakeup()) == []
    assert says(r, 112.0, "running", "a", "b") == []
    assert not r.between_epochs
    assert SendRelease("b") in r.tick(r.next_wakeup())  # a step that takes too long


def test_a_node_that_has_to_go_does_not_wait():
    r = running("a", "b")
    says(r, 110.0, "between-epochs", "a", "b")
    assert r.move(("a",), 111.0, 30.0) == [SendDrain("a", 1, 1)]
    assert r.next_wakeup() <= 111.0 + SETTINGS.drain_limit_s(30.0)
    assert SendRelease("b") in r.tick(r.next_wakeup())
    assert r.stage is RoundStage.FORMING
