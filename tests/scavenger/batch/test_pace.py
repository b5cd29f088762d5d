"""At which pace requests may be made."""

from hypothesis import given
from hypothesis import strategies as st

from scavenger.batch.pace import TokenBucket


class Time:
    """A clock that goes on when somebody sleeps."""

    def __init__(self):
        self.now = 50.0
        self.slept = []

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def bucket(rate=0.5, burst=3):
    time = Time()
    return TokenBucket(rate, burst, lambda: time.now, time.sleep), time


def test_the_first_ones_go_at_once_the_others_at_the_rate():
    one, time = bucket()
    assert one.whole == 3
    for _ in range(6):
        one.wait()
    assert time.slept == [0, 0, 0, 2, 2, 2]
    assert one.whole == 0
    time.now += 100
    assert one.whole == 3, "and no more than that, however long nothing was asked for"


def test_what_is_cancelled_never_waits_and_has_submissions_wait():
    one, time = bucket()
    assert one.spend(3) == 0
    assert one.spend(2) == 4
    assert time.slept == []
    one.wait()
    assert time.slept == [6]


def test_a_mass_cancel_is_not_paid_for_longer_than_a_burst():
    one, time = bucket()
    one.spend(500)
    time.now += 3 / 0.5
    assert one.whole == 0
    time.now += 1 / 0.5
    assert one.whole == 1


@given(
    st.floats(0.1, 50),
    st.integers(1, 50),
    st.lists(st.floats(0, 20), min_size=1, max_size=60),
)
def test_never_more_than_a_burst_and_the_rate(rate, burst, pauses):
    one, time = bucket(rate, burst)
    began = time.now
    for count, pause in enumerate(pauses, 1):
        time.now += pause
        one.wait()
        assert count <= burst + rate * (time.now - began) + 1e-6
