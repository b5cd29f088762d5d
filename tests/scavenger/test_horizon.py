"""The estimator of remaining gap length, against the sample itself and as a law: invariants by
hypothesis.
"""

import itertools
import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.horizon import EDGES_S, RATE_WINDOW_S, GapWatch, SurvivalEstimator
from tests.draws import cases

lengths = st.lists(st.tuples(st.floats(0.0, 1e7), st.booleans()), max_size=60)
ages = st.floats(0.0, 1e7)


def fed(observations, **options):
    estimator = SurvivalEstimator(**options)
    for length, ended in observations:
        estimator.observe(length, ended=ended)
    return estimator


@given(observations=lengths, age=ages, times=st.lists(st.floats(0.0, 1e7), min_size=2, max_size=6))
@settings(max_examples=cases(100), deadline=None)
def test_survival_is_a_survival_function(observations, age, times):
    estimator = fed(observations)
    values = [estimator.survival(t, age) for t in sorted(times)]
    assert all(0.0 <= v <= 1.0 + 1e-12 for v in values)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(values))
    assert estimator.survival(0.0, age) == 1.0


@given(observations=lengths, age=ages)
@settings(max_examples=cases(100), deadline=None)
def test_at_the_end_rate_as_many_gaps_survive_the_window_as_the_table_says(observations, age):
    estimator = fed(observations)
    rate = estimator.end_rate(age)
    assert rate >= 0.0
    assert math.exp(-rate * RATE_WINDOW_S) == pytest.approx(
        estimator.survival(RATE_WINDOW_S, age), abs=1e-8
    )


@given(observations=lengths, age=ages)
@settings(max_examples=cases(60), deadline=None)
def test_the_expectation_is_positive_finite_and_the_integral_of_the_survival(observations, age):
    estimator = fed(observations)
    expected = estimator.expected_remaining(age)
    assert 0.0 < expected < EDGES_S[-1]
    if age < 1e5:
        total, previous = 0.0, age
        for edge in [e for e in EDGES_S if e > age]:
            total += (
                (edge - previous)
                * (estimator.survival(previous - age, age) + estimator.survival(edge - age, age))
                / 2
            )
            previous = edge
        assert expected == pytest.approx(total, rel=1e-6)


@given(observations=lengths, age=ages)
@settings(max_examples=cases(60), deadline=None)
def test_storing_keeps_the_estimate(observations, age):
    estimator = fed(observations)
    again = SurvivalEstimator.from_dict(
        json.loads(json.dumps(estimator.to_dict(), allow_nan=False))
    )
    assert again.expected_remaining(age) == pytest.approx(
        estimator.expected_remaining(age), rel=1e-9
    )
    assert again.observed == estimator.observed
    again.observe(100.0)
    estimator.observe(100.0)
    assert again.expected_remaining(age) == pytest.approx(
        estimator.expected_remaining(age), rel=1e-6
    )


@given(observations=lengths, seed=st.integers(0, 99), age=ages)
@settings(max_examples=cases(40), deadline=None)
def test_without_forgetting_the_order_does_not_matter(observations, seed, age):
    shuffled = list(observations)
    random.Random(seed).shuffle(shuffled)
    a, b = (fed(o, half_life=None).expected_remaining(age) for o in (observations, shuffled))
    assert a == pytest.approx(b, rel=1e-9)


@pytest.mark.parametrize("age", [0.0, 60.0, 500.0, 3000.0])
def test_the_estimate_matches_the_sample(age):
    rng = random.Random(4)
    sample = [rng.lognormvariate(6.0, 1.2) for _ in range(20_000)]
    estimator = fed([(x, True) for x in sample], half_life=None)
    remaining = sorted(x - age for x in sample if x >= age)
    assert estimator.expected_remaining(age) == pytest.approx(
        sum(remaining) / len(remaining), rel=0.08
    )
    for time_s in (60.0, 400.0, 2000.0):
        part = sum(x > time_s for x in remaining) / len(remaining)
        assert estimator.survival(time_s, age) == pytest.approx(part, abs=0.03)


def test_gaps_with_an_unseen_end_do_not_shorten_the_estimate():
    rng = random.Random(7)
    sample = [rng.expovariate(1 / 1000.0) for _ in range(20_000)]
    # Watched for 800 s at most: the mean of what was seen is far below the truth, the estimate of
    # the first 800 s is not.
    watched = fed([(min(x, 800.0), x <= 800.0) for x in sample], half_life=None)
    for t in (100.0, 400.0, 700.0):
        assert watched.survival(t) == pytest.approx(math.exp(-t / 1000.0), abs=0.03)


def test_a_cold_start_gives_the_configured_value_and_data_takes_over():
    estimator = SurvivalEstimator(prior_mean_s=300.0)
    assert estimator.expected_remaining() == pytest.approx(300.0, rel=0.05)
    for _ in range(500):
        estimator.observe(5000.0)
    assert estimator.expected_remaining() == pytest.approx(
        (500 * 5000.0 + 10 * 300.0) / 510, rel=0.075
    )  # half a bin
    assert estimator.survival(4000.0) > 0.95


def test_old_gaps_are_forgotten():
    estimator = SurvivalEstimator(half_life=50.0)
    for length, times in ((100.0, 3000), (10_000.0, 500)):
        for _ in range(times):
            estimator.observe(length)
    assert estimator.survival(5000.0) > 0.75
    assert estimator.observed == 3500


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_impossible_lengths_are_ignored(bad):
    estimator = SurvivalEstimator()
    estimator.observe(bad)
    assert estimator.observed == 0


@pytest.mark.parametrize(
    "stored",
    [
        {},
        [],
        {"format": 2},
        None,
        {**SurvivalEstimator().to_dict(), "ended": {"9999": 1.0}},
        {**SurvivalEstimator().to_dict(), "unseen": {"1": "x"}},
        {**SurvivalEstimator().to_dict(), "prior_mean_s": -5},
    ],
)
def test_damaged_storage_is_refused(stored):
    with pytest.raises(ValueError, match=r"cannot be used \(.*\); delete them to start again"):
        SurvivalEstimator.from_dict(stored)


def test_bad_parameters_are_refused():
    with pytest.raises(ValueError, match="prior_mean_s must be a positive number"):
        SurvivalEstimator(prior_mean_s=0.0)


def test_polls_become_gap_lengths():
    estimator = SurvivalEstimator()
    watch = GapWatch(estimator)
    watch.update({"a": 100.0, "b": 110.0}, 120.0)
    watch.update({"a": 100.0, "b": 110.0}, 130.0)
    assert estimator.observed == 0
    watch.update({"b": 138.0}, 140.0)  # a has ended; b too, and began again between two polls
    assert estimator.observed == 2
    assert watch.horizon(138.0, 140.0) == estimator.expected_remaining(2.0)
    seen = estimator.to_dict()["ended"]
    lengths_seen = [EDGES_S[int(k)] for k in seen]
    assert all(20.0 <= x <= 35.0 for x in lengths_seen)


def test_gaps_that_began_together_are_one_cohort_with_one_forecast():
    estimator = fed([(60.0, True)] * 500)
    watch = GapWatch(estimator)
    watch.update({"a": 100.0, "b": 100.0, "c": 130.0}, 140.0)
    forecasts = watch.forecasts(140.0)
    assert forecasts["a"] == forecasts["b"]
    assert [forecasts[node].cohort for node in "abc"] == [100.0, 100.0, 130.0]
    assert forecasts["c"].horizon_s == watch.horizon(130.0, 140.0)
    assert forecasts["c"].end_rate == estimator.end_rate(10.0) > 0.02
    watch.update({"c": 130.0}, 150.0)
    assert watch.forecasts(150.0).keys() == {"c"}


def test_a_gap_that_has_outlived_the_short_ones_ends_less_soon():
    estimator = fed([(30.0, True)] * 50 + [(10_000.0, True)] * 50)
    assert estimator.end_rate(200.0) < 0.1 * estimator.end_rate(0.0)
    assert estimator.expected_remaining(200.0) > estimator.expected_remaining(0.0)
