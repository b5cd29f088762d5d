"""Bids of jobs with deadlines and budgets, and what the real allocator makes of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator import Goal, NodeInfo, RescaleCost, ScalingCurve
from malletrain.core.goal_bids import (
    GoalTerms,
    Need,
    Purse,
    payable,
    price_of_a_node,
    with_goals,
    worth,
)
from malletrain.core.planning import Candidate, PlanningSettings, make_plan
from malletrain.core.pools import Pool
from tests.allocator.strategies import curves

FAST = ScalingCurve.of({1: 1000.0, 8: 8000.0})
SLOW = ScalingCurve.of({1: 10.0, 8: 60.0})
NODES = {f"n{k}": NodeInfo(Pool("default")) for k in range(8)}
FREE = PlanningSettings(cost=RescaleCost(0.0, 0.0, 0.0))


def sizes(candidates):
    plan = make_plan(candidates, NODES, FREE)
    return {job: len(nodes) for job, nodes in plan.nodes.items()}


def fast(**more):
    return Candidate("fast", 1, 8, (), curve=FAST, **more)


def slow(**more):
    return Candidate("slow", 1, 8, (), curve=SLOW, **more)


def due(nodes, before=0, useful=0):
    return {"slow": GoalTerms(SLOW, Need(nodes, 1.0, useful), before=before)}


def test_what_a_deadline_needs_is_given_to_it_and_no_more():
    assert sizes([fast(), slow()]) == {"fast": 8, "slow": 0}
    assert sizes(with_goals([fast(), slow()], due(3), 4.0, 0.9)) == {"fast": 5, "slow": 3}


def test_a_weight_below_one_lets_others_go_first():
    assert sizes(with_goals([fast(), slow()], due(3), 0.5, 0.9)) == {"fast": 8, "slow": 0}


def test_nodes_that_nobody_else_wants_are_used_to_get_ahead():
    one = Candidate("fast", 1, 2, (), curve=FAST)
    assert sizes(with_goals([one, slow()], due(3), 4.0, 0.9)) == {"fast": 2, "slow": 6}


def test_without_ahead_a_deadline_takes_no_more_than_it_needs():
    assert sizes(with_goals([slow()], due(3), 4.0, 0.0)) == {"slow": 3}


def test_the_earlier_deadline_is_served_first():
    other = Candidate("other", 1, 8, (), curve=SLOW)
    terms = {**due(8, before=1), "other": GoalTerms(SLOW, Need(6, 0.2))}
    assert sizes(with_goals([fast(), slow(), other], terms, 4.0, 0.9)) == {
        "fast": 0,
        "slow": 2,
        "other": 6,
    }


def test_a_job_of_unknown_speed_bids_as_others_do():
    unknown = Candidate("slow", 1, 8, ())
    (bid,) = with_goals([unknown], {"slow": GoalTerms(None, Need(1, 1.0))}, 4.0, 0.9)
    assert bid == unknown


@given(
    st.lists(st.floats(0.1, 1e4), min_size=2, max_size=8),
    st.integers(1, 8),
    st.integers(0, 12),
    st.floats(0.0, 8.0),
    st.sampled_from(list(Goal)),
    st.floats(0.1, 10.0),
)
def test_no_node_is_worth_more_than_the_weight_times_what_others_lose(
    rates, need, before, weight, goal, own_weight
):
    curve = ScalingCurve.of(enumerate(rates, start=1))
    bidder = Candidate("slow", 1, 8, (), curve=curve, goal=goal, weight=own_weight)
    price = price_of_a_node([fast(), bidder])
    terms = {"slow": GoalTerms(curve, Need(need, 1.0, need + 1), before=before)}
    bid = with_goals([fast(), bidder], terms, weight, 0.9)[1]
    assert (bid.goal, bid.weight) == (Goal.THROUGHPUT, 1.0)
    rounding = 2 ** (1 / 16)
    for nodes, value in bid.curve.points:
        if nodes <= need:
            assert value / nodes <= max(1.0, weight) * price * rounding * (1 + 1e-9)


def test_worth_is_never_below_what_the_job_makes_of_its_nodes():
    value = worth(FAST, 1.0, (3, 3), (10.0, 0.0), 0.9)
    assert [value.at(k) for k in (1, 3)] == [1000.0, 3000.0]
    assert value.at(8) == pytest.approx(3000.0 + 0.9 * 5000.0)


FALLING = ScalingCurve.of({1: 10.0, 2: 18.0, 4: 28.0, 8: 40.0})
"""10, 9, 7 and 5 samples a node-second."""


@pytest.mark.parametrize(
    ("purse", "node_count", "offered"),
    [
        (Purse(7.0, 100), 0, (1, 2, 3, 4)),
        (Purse(9.5, 100), 0, (1,)),
        (Purse(20.0, 100), 0, (1,)),
        (Purse(None, 100), 0, (1, 2)),
        (Purse(1.0, 2), 0, (1, 2)),
        (Purse(1.0, 0), 0, ()),
        (Purse(1.0, 0), 4, (4,)),
        (Purse(7.5, 100), 4, (1, 2, 3, 4)),
        (Purse(9.0, 100), 4, (1, 2)),
    ],
    ids=[
        "all that are good enough",
        "only the best",
        "not enough for any: the best",
        "unknown work",
        "what can be paid",
        "nothing can be paid",
        "what it has it keeps",
        "nearly good enough is kept",
        "but not what is far from it",
    ],
)
def test_sizes_that_a_budget_allows(purse, node_count, offered):
    nodes = tuple(f"n{k}" for k in range(node_count))
    candidate = Candidate("j", 1, 8, nodes, curve=FALLING)
    assert payable(candidate, FALLING, purse) == offered


def test_who_can_pay_nothing_does_not_bid():
    terms = {"slow": GoalTerms(SLOW, purse=Purse(1.0, 0))}
    assert [c.job for c in with_goals([fast(), slow()], terms, 4.0, 0.9)] == ["fast"]


def test_jobs_without_goals_bid_as_before():
    candidates = [fast(), slow()]
    assert with_goals(candidates, {}, 4.0, 0.9) == candidates
    assert FALLING.best_rate_per_node == 10.0


@given(
    curves(),
    st.floats(0.01, 100.0),
    st.tuples(st.integers(1, 20), st.integers(0, 20)),
    st.tuples(st.floats(0.0, 1e4), st.floats(0.0, 1e4)),
    st.floats(0.0, 1.0),
)
def test_a_curve_with_a_deadline_is_worth_what_its_nodes_are(curve, unit, need, node, ahead):
    least, useful = need[0], max(need)
    value_curve = worth(curve, unit, need, node, ahead)
    assert {n for n, _ in value_curve.points} == {n for n, _ in curve.points} | {least, useful}
    for nodes, value in value_curve.points:
        plain = unit * curve.at(nodes)
        if nodes <= useful:
            early = max(0, nodes - least)
            expected = max(plain, node[0] * (nodes - early) + node[1] * early)
        else:
            expected = value_curve.at(useful) + ahead * (plain - unit * curve.at(useful))
        assert value == pytest.approx(max(0.0, expected), rel=1e-9, abs=1e-9)
