"""What jobs are charged: known answers, and that a lease is paid once."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.core.goal_record import JobAccount


def test_a_node_costs_from_when_it_is_taken_to_when_it_is_left_times_the_factor():
    account = JobAccount(factor=0.5)
    account.takes("a", 10.0, paid_until=0.0)
    account.takes("b", 20.0, paid_until=0.0)
    assert account.charged(30.0) == 0.5 * (20.0 + 10.0)
    account.leaves("a", 30.0)
    assert account.charged(50.0) == 0.5 * (20.0 + 30.0)


def test_the_least_charge_of_a_lease_is_owed_by_who_left_it_last():
    first, second = JobAccount(), JobAccount()
    first.takes("a", 0.0, paid_until=3600.0)
    assert first.charged(600.0) == 3600.0
    first.leaves("a", 600.0)
    assert first.charged(700.0) == 3600.0
    second.takes("a", 1000.0, paid_until=3600.0)
    first.taken_over(["a"], 1000.0)
    assert first.charged(2000.0) == 1000.0
    assert second.charged(2000.0) == 2600.0
    second.leaves("a", 5000.0)
    assert first.charged(9e9) + second.charged(9e9) == 5000.0


@pytest.mark.parametrize(
    ("holds", "budget_s", "at"),
    [
        ({"a": (0.0, 0.0)}, 100.0, 100.0),
        ({"a": (0.0, 0.0), "b": (0.0, 0.0)}, 100.0, 50.0),
        ({"a": (0.0, 3600.0)}, 3600.0, 3600.0),
        ({"a": (0.0, 3600.0)}, 100.0, 3600.0),
        ({"a": (0.0, 60.0), "b": (0.0, 90.0)}, 190.0, 95.0),
        ({}, 100.0, math.inf),
    ],
    ids=["one", "two", "an hour is paid", "paid though it was too much", "one by one", "none"],
)
def test_when_a_budget_is_spent(holds, budget_s, at):
    account = JobAccount()
    for node, (since, paid_until) in holds.items():
        account.takes(node, since, paid_until)
    assert account.costs_more_at(budget_s, 0.0) == at
    if at < math.inf:
        assert account.charged(at + 1e-6) >= min(budget_s, account.charged(at))


@given(
    st.lists(st.tuples(st.floats(1.0, 500.0), st.integers(0, 1)), min_size=1, max_size=12),
    st.floats(0.0, 2000.0),
)
def test_jobs_that_share_a_lease_pay_it_once(turns, least_s):
    """Two jobs in any turns on one lease, with or without a least charge: together they pay the
    time they had it and what was left of the least charge.
    """
    accounts = JobAccount(), JobAccount()
    at, holder = 0.0, None
    for seconds, who in turns:
        if who != holder:
            if holder is not None:
                accounts[holder].leaves("a", at)
            accounts[who].takes("a", at, least_s)
            accounts[1 - who].taken_over(["a"], at)
            holder = who
        at += seconds
    accounts[holder].leaves("a", at)
    paid = sum(account.charged(at) for account in accounts)
    assert paid == pytest.approx(max(at, least_s))
