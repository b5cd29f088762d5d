"""Smoothed curves for bids: the law if it explains all measurements, else the points."""

import math
import random
import statistics

import pytest

from allocator import Goal, RescaleCost, make_bid
from jpa.curve import MeasuredCurve
from jpa.phase import PhaseCurve, Prior
from jpa.points import Point
from tests.allocator.oracles.dp import solve
from tests.jpa.models import fixed_global_batch, linear

SIZES = range(1, 7)


def profile(law, rng, noise=0.015):
    curve = MeasuredCurve()
    for k in reversed(SIZES):
        curve = curve.with_measurement(
            k, law(k) * math.exp(rng.gauss(0, noise)), 2 * noise * law(k), 0.0
        )
    return curve


def shares(curve, nodes):
    """Sizes of two alike jobs of this curve."""
    bids = [
        make_bid(
            name,
            curve.conservative(SIZES, 0.5),
            max_nodes=6,
            goal=Goal.THROUGHPUT,
            cost=RescaleCost(0, 0, 0),
        )
        for name in "ab"
    ]
    plan = solve(bids, {"default": nodes})
    return sorted(plan.size(name) for name in "ab")


def test_two_noisy_profiles_of_a_bent_curve_give_the_plan_of_the_true_one():
    law, rng = fixed_global_batch(0.2), random.Random(3)
    for _ in range(10):
        curve = profile(law, rng)
        for nodes in range(2, 13):
            assert shares(curve, nodes) == [nodes // 2, nodes - nodes // 2]


@pytest.mark.parametrize("law", [linear, fixed_global_batch(0.05), fixed_global_batch(0.4)])
def test_the_law_is_nearer_to_the_truth_than_the_points(law):
    rng, believed, points = random.Random(5), [], []
    for _ in range(30):
        curve = profile(law, rng)
        believed += [abs(curve.smoothed(k)[0] / law(k) - 1) for k in SIZES]
        points += [abs(curve.estimate(k)[0] / law(k) - 1) for k in SIZES]
    assert statistics.fmean(believed) < 0.9 * statistics.fmean(points)


@pytest.mark.parametrize(
    "points",
    [
        {
            1: 100.0,
            2: 200.0,
            3: 300.0,
            4: 220.0,
            6: 400.0,
        },  # a kink that no law knows and no noise makes
        {1: 100.0, 2: 190.0},
        {1: 100.0, 2: 190.0, 4: 0.0},
    ],
)
def test_points_stay_where_no_law_holds(points):
    curve = MeasuredCurve()
    for k, rate in points.items():
        curve = curve.with_measurement(k, rate, 0.01 * rate, 0.0)
    for k in range(1, 9):
        assert curve.smoothed(k) == curve.estimate(k)


def test_many_observations_bring_a_small_kink_to_light():
    law = fixed_global_batch(0.1)
    coarse = fine = MeasuredCurve()
    for k in SIZES:
        rate = law(k) * (0.96 if k == 4 else 1.0)
        coarse = coarse.with_measurement(k, rate, 0.06 * rate, 0.0)
        fine = fine.with_measurement(k, rate, 0.02 * rate, 0.0)
        for window in range(20):
            fine, _ = fine.observe(k, rate, 0.02 * rate, float(window))
    assert coarse.smoothed(4)[0] > coarse.estimate(4)[0]
    assert fine.smoothed(4) == fine.estimate(4)


def test_a_prior_shape_and_unusable_sizes_are_kept():
    points = tuple(Point(k, 100.0 * k, (2.0 * k) ** 2) for k in (1, 2, 4))
    sibling = PhaseCurve(points, Prior(((1, 1.0), (4, 3.0)), 0.3, 0.05, "a sibling"))
    assert sibling.smoothed(3) == sibling.estimate(3)
    curve = profile(linear, random.Random(0)).with_unusable(3)
    assert curve.smoothed(3) == (0.0, 0.0)
    assert curve.smoothed(2)[0] > 0
