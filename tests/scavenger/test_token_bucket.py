"""At which pace something may be done."""

from hypothesis import given
from hypothesis import strategies as st

from scavenger.token_bucket import TokenBucket


class Time:
    """A clock."""

    def __init__(self):
        self.now = 50.0


def bucket(rate=0.5, burst=3):
    time = Time()
    return TokenBucket(rate, burst, lambda: time.now), time


def test_the_first_ones_go_at_once_the_others_at_the_rate():
    one, time = bucket()
    assert one.available == 3
    assert [one.take() for _ in range(5)] == [True, True, True, False, False]
    assert one.available == 0
    time.now += 2
    assert [one.take(), one.take()] == [True, False], "what was refused costs nothing"
    time.now += 100
    assert one.available == 3, "and no more than that, however long nothing was asked for"


def test_what_is_cancelled_never_waits_and_puts_off_submissions():
    one, time = bucket()
    assert one.spend(3) == 0
    assert one.spend(2) == 4
    time.now += 5
    assert not one.take()
    time.now += 1
    assert one.take()


def test_a_mass_cancel_is_not_paid_for_longer_than_a_burst():
    one, time = bucket()
    one.spend(500)
    time.now += 3 / 0.5
    assert one.available == 0
    time.now += 1 / 0.5
    assert one.available == 1


@given(
    st.floats(0.1, 50),
    st.integers(1, 50),
    st.lists(st.floats(0, 20), min_size=1, max_size=60),
)
def test_never_more_than_a_burst_and_the_rate(rate, burst, pauses):
    one, time = bucket(rate, burst)
    began = time.now
    taken = 0
    for pause in pauses:
        time.now += pause
        taken += sum(one.take() for _ in range(5))
        assert taken <= burst + rate * (time.now - began) + 1e-6
