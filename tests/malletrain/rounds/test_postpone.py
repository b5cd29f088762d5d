"""Time in which nobody could be heard does not count against a round."""

import pytest

from malletrain.rounds.interface import RoundSettings
from malletrain.rounds.live import LiveRounds
from malletrain.rounds.restart import RestartRounds
from malletrain.rounds.service import ServiceRounds


@pytest.mark.parametrize("kind", [RestartRounds, LiveRounds, ServiceRounds])
def test_what_was_due_is_due_later(kind):
    rounds = kind(RoundSettings(), 1, 0)
    rounds.postpone(5.0)
    assert rounds.next_wakeup() is None
    rounds.move(("n1", "n2"), 0.0)
    due = rounds.next_wakeup()
    assert due is not None
    rounds.postpone(40.0)
    assert rounds.next_wakeup() == due + 40.0
    assert rounds.tick(due + 39.0) == []
    assert rounds.tick(due + 41.0) != []
