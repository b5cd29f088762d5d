"""The rules that choose the part of a round for experienced clients."""

from __future__ import annotations

from random import Random

import pytest
from fedcase.ratio import RULES, SHARES, EpsilonGreedy, Forest, reward_of


@pytest.mark.parametrize(
    ("before", "after", "seconds", "expected"),
    [
        (2.0, 1.0, 5.0, 0.1),
        (1.0, 1.5, 0.5, -1.0),  # a loss that rises is a negative reward
        (1.0, 1.0, 3.0, 0.0),
        (None, 1.0, 3.0, None),  # round 1
        (0.0, 1.0, 3.0, None),
        (2.0, 1.0, 0.0, None),
    ],
)
def test_reward(before, after, seconds, expected):
    assert reward_of(before, after, seconds) == expected


def test_greedy_tries_each_share_and_keeps_to_the_best():
    rule = EpsilonGreedy(epsilon=0.0)
    tried = []
    for reward in (0.1, 0.4, 0.3, -0.2):
        tried.append(rule.choose(Random(0)))
        rule.observe(tried[-1], reward)
    assert tried == list(SHARES)
    assert rule.choose(Random(0)) == SHARES[1]
    # 0.4 + 0.3 · (−0.1 − 0.4) = 0.25: another one is better now.
    rule.observe(SHARES[1], -0.1)
    assert rule.means[SHARES[1]] == pytest.approx(0.25)
    assert rule.choose(Random(0)) == SHARES[2]


def test_greedy_explores_with_its_probability():
    rule = EpsilonGreedy(epsilon=0.2, means=dict.fromkeys(SHARES, 0.0) | {SHARES[3]: 1.0})
    random = Random(3)
    other = sum(rule.choose(random) != SHARES[3] for _ in range(4000)) / 4000
    # Of the draws of another share a quarter is the best one again.
    assert other == pytest.approx(0.2 * 3 / 4, abs=0.02)


def test_the_forest_chooses_the_greatest_reward():
    rule = Forest(least=8)
    assert [_turn(rule, {0.75: 1.0}) for _ in range(8)] == [*SHARES, *SHARES]
    for _ in range(12):
        _turn(rule, {0.75: 1.0})
    assert rule.choose(Random(0)) == 0.75


def _turn(rule, rewards):
    share = rule.choose(Random(0))
    rule.observe(share, rewards.get(share, -1.0))
    return share


@pytest.mark.parametrize("name", RULES)
def test_a_rule_goes_on_from_its_state(name):
    rule, other = RULES[name](), RULES[name]()
    for _ in range(5):
        _turn(rule, {0.5: 2.0})
    other.restore(rule.state())
    assert other == rule
