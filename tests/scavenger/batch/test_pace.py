"""At which pace requests may be made."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scavenger.batch.calls import CallLog, requests_of
from scavenger.batch.pace import RequestBudget
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


def test_requests_of_commands_as_sdiag_counts_them():
    assert requests_of(["squeue", "-h"]) == requests_of(["sinfo"]) == 2
    assert requests_of(["scontrol", "show", "reservation"]) == requests_of(["sbatch"]) == 1
    assert requests_of(["scancel", "--signal=TERM", "7", "8", "9_[1-2]"]) == 3
    assert requests_of(["sudo", "-u", "ann", "--", "/usr/bin/scancel", "7", "8"]) == 2
    assert requests_of(["qdel", "1.pbs0"]) == 1


def test_polls_and_leases_keep_to_the_budget_together():
    calls, time = CallLog(), Time()
    budget = RequestBudget(calls, 2.0, 5.0, lambda: time.now)
    assert (budget.room, budget.poll_after_s) == (25, 0)
    for _ in range(2):
        calls.count("x", "ok", requests=5)
    assert (budget.room, budget.poll_after_s) == (15, 0)
    for _ in range(3):
        calls.count("x", "ok", requests=5)
    assert (budget.room, budget.poll_after_s) == (0, 7.5)
    calls.count("x", "ok", requests=5)
    assert budget.poll_after_s == 10
    time.now += 10
    assert (budget.room, budget.poll_after_s) == (15, 0)


def test_a_site_that_polls_often_on_purpose_may():
    calls, time = CallLog(), Time()
    budget = RequestBudget(calls, 2.0, 1.0, lambda: time.now)
    for _ in range(100):
        calls.count("x", "ok", requests=5)
        time.now += 1
        assert budget.poll_after_s == 0


@pytest.mark.parametrize("interval_s", [1.0, 2.5, 5.0, 7.5, 30.0])
@pytest.mark.parametrize("event_every_s", [0.1, 1.0, 2.0, 3.0, 5.0, 1000.0])
def test_polls_that_events_ask_for_leave_something_for_leases(event_every_s, interval_s):
    """As the daemon polls: each interval, and after events as soon as the budget allows."""
    calls, time, leases = CallLog(), Time(), 0
    budget = RequestBudget(calls, 2.0, min(interval_s, 5.0), lambda: time.now)
    began, polls = time.now, 0
    while time.now - began < 1200:
        calls.count("squeue", "ok", requests=5)
        polls += 1
        room = budget.room
        calls.count("sbatch", "ok", requests=room)
        leases += room
        pause = min(interval_s, max(min(1.0, interval_s / 5), budget.poll_after_s))
        time.now += min(interval_s, max(pause, event_every_s))
    took = time.now - began
    assert leases >= 0.49 * took
    assert polls >= 0.99 * took / interval_s, "the regular ones are made whatever happens"
    assert polls * 5 + leases <= max(2.0, 5 / interval_s + 0.5) * took + 60


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
