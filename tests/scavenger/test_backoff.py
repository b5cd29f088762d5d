"""For how long a user or a node is left alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scavenger.backoff import Backoff


def test_each_time_twice_as_long_until_it_answers():
    one = Backoff(5.0, 60.0)
    now, waits = 100.0, []
    for _ in range(5):
        one.refused(now, "busy")
        waits.append(one.remaining_s(now))
        now += waits[-1]
    assert waits == [5, 10, 20, 40, 60]
    assert one.remaining_s(now) == 0
    assert one.reason == "busy"
    one.answered(now)
    assert one.reason == ""
    one.refused(now)
    assert one.remaining_s(now) == 5


def test_what_was_under_way_counts_once_and_an_early_answer_ends_nothing():
    one = Backoff(5.0, 60.0)
    one.refused(0.0, "busy")
    one.refused(1.0, "busy too")
    one.answered(2.0)
    assert (one.refusals, one.reason, one.remaining_s(2.0)) == (1, "busy", 3.0)


def test_free_refusals_change_nothing():
    one = Backoff(5.0, 60.0, free_refusals=1)
    one.refused(0.0)
    assert one.remaining_s(0.0) == 0
    one.refused(0.0)
    assert one.remaining_s(0.0) == 5


@given(st.lists(st.tuples(st.floats(0, 500), st.booleans()), max_size=200))
def test_it_never_waits_longer_than_it_may(steps):
    one, now = Backoff(5.0, 300.0), 0.0
    for pause, refuses in steps:
        now += pause
        (one.refused if refuses else one.answered)(now)
        assert 0 <= one.remaining_s(now) <= 300 + 1e-6


@pytest.mark.parametrize("refusals", [1000, 100_000])
def test_a_refusal_for_ever_is_no_overflow(refusals):
    one = Backoff(1.0, 300.0)
    one.refusals = refusals
    one.refused(0.0)
    assert one.remaining_s(0.0) == 300
