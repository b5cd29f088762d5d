"""The estimated pause of a rescale, from observations with outliers."""

import math
import random

import pytest

from allocator.bids import RescaleCost
from jpa.costs import RescaleCosts


def test_the_configured_value_holds_until_something_is_seen():
    costs = RescaleCosts(18.0, 12.0, 20.0)
    assert (costs.up_s, costs.down_s, costs.start_s) == (18.0, 12.0, 20.0)


def test_observations_take_over():
    rng, costs = random.Random(0), RescaleCosts(60.0, 60.0, 60.0)
    for _ in range(15):
        costs = costs.observe("up", rng.uniform(17, 19)).observe("down", rng.uniform(11, 13))
    assert costs.up_s == pytest.approx(18, rel=0.2)
    assert costs.down_s == pytest.approx(12, rel=0.3)
    assert costs.start_s == 60.0


def test_one_hiccup_hardly_counts():
    costs = RescaleCosts(18.0, 12.0, 18.0)
    for seconds in (18, 17, 19, 18, 300, 18, 17.5):
        costs = costs.observe("up", seconds)
    assert costs.up_s < 20


def test_a_lasting_change_is_learnt_and_the_past_forgotten():
    costs = RescaleCosts()
    for _ in range(30):
        costs = costs.observe("down", 8.0)
    for _ in range(20):
        costs = costs.observe("down", 2.0)
    assert costs.down_s == pytest.approx(2.0, abs=0.4)
    assert len(costs.down) == 20


def test_the_estimates_fit_the_allocator():
    costs = RescaleCosts().observe("start", 0.0)
    cost = RescaleCost(costs.up_s, costs.down_s, costs.start_s)
    assert cost.start_s == 5.0


@pytest.mark.parametrize(
    ("kind", "seconds"), [("sideways", 1.0), ("up", -1.0), ("up", math.nan), ("down", math.inf)]
)
def test_impossible_observations_are_refused(kind, seconds):
    with pytest.raises(ValueError, match=r"rescale"):
        RescaleCosts().observe(kind, seconds)


def test_impossible_configured_values_are_refused():
    with pytest.raises(ValueError, match="down_prior_s"):
        RescaleCosts(down_prior_s=-1.0)


def test_observations_survive_the_store_and_nonsense_in_it_is_left_out():
    costs = RescaleCosts().observe("up", 5.0).observe("start", 7.0)
    assert RescaleCosts().with_stored(costs.to_dict()) == costs
    assert RescaleCosts().with_stored({"up": [3.0, "x", -1.0, math.nan]}).up == (3.0,)
