"""Where a step's time goes, as ``malletrain show`` prints it."""

import pytest

from malletrain.protocol.views import StepTimesView
from malletrain.render.step_times import WORDS, seconds, sentence


def test_the_shares_are_a_sentence():
    shares = {"data": 0.41, "computing": 0.48, "others": 0.11, "transfer": 0.004}
    expected = "41 % waiting for data, 48 % computing, 11 % waiting for other ranks"
    assert sentence(shares) == expected


def test_words_are_those_of_the_parts():
    from malletrain.core.step_times import SHARES
    from malletrain.web.history import STACKED

    assert set(WORDS) == set(SHARES) == set(STACKED)


@pytest.mark.parametrize(
    ("duration", "text"),
    [(3.14159, "3.14 s"), (0.12, "120 ms"), (0.00025, "0.25 ms"), (0.0, "0")],
)
def test_durations_within_a_step(duration, text):
    assert seconds(duration) == text


def test_a_view_without_ranks_is_complete():
    assert StepTimesView(0.1, {"computing": 1.0}, "Advice.").ranks == ()
