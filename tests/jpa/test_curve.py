"""Curves: interpolation, extrapolation, uncertainty, phases, drift and serialisation."""

import json
import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.curves import CurveError
from jpa.curve import MeasuredCurve
from jpa.phase import PhaseCurve, Prior
from tests.jpa.models import fixed_global_batch, linear, summit


def measured(points, width=0.02, curve=None):
    curve = curve or MeasuredCurve()
    for k, rate in points.items():
        curve = curve.with_measurement(k, rate, width * rate, 0.0)
    return curve


RATES = st.dictionaries(st.integers(1, 128), st.floats(1e-2, 1e6), min_size=2, max_size=8)


@settings(deadline=None)
@given(RATES)
def test_between_two_sizes_the_curve_never_leaves_their_range(points):
    curve = measured(points)
    sizes = sorted(points)
    for low, high in pairwise(sizes):
        for k in {low + 1, (low + high) // 2, high - 1} & set(range(low + 1, high)):
            rate, std = curve.estimate(k)
            assert (
                min(points[low], points[high]) * (1 - 1e-9)
                <= rate
                <= max(points[low], points[high]) * (1 + 1e-9)
            )
            assert std > 0


@settings(deadline=None)
@given(RATES, st.integers(1, 200))
def test_every_estimate_is_finite_and_not_negative(points, k):
    rate, std = measured(points).estimate(k)
    assert math.isfinite(rate)
    assert math.isfinite(std)
    assert rate >= 0
    assert std >= 0


@settings(deadline=None)
@given(
    st.dictionaries(
        st.integers(1, 64), st.just(0.0) | st.floats(1e-3, 1e6), min_size=1, max_size=6
    ),
    st.floats(0, 3),
)
def test_the_conservative_curve_is_a_valid_one_below_the_estimate(points, kappa):
    curve = measured(points)
    bid = curve.conservative(range(1, 65), kappa)
    assert all(bid.at(k) <= curve.smoothed(k)[0] * (1 + 1e-9) + 1e-6 for k in range(1, 65))


def test_an_amdahl_curve_is_interpolated_exactly():
    law = fixed_global_batch(0.2)
    curve = measured({2: law(2), 16: law(16)})
    for k in range(3, 16):
        assert curve.estimate(k)[0] == pytest.approx(law(k), rel=1e-6)


def test_uncertainty_grows_with_the_distance_from_measured_sizes():
    curve = measured({4: 400.0, 8: 800.0, 16: 1550.0})
    width = curve.relative_half_width
    assert width(8) < width(12)
    assert width(16) < width(20) < width(32) < width(64)
    assert width(4) < width(3) < width(2) < width(1)


def test_a_measured_size_keeps_its_rate_and_its_spread():
    curve = measured({6: 120.0}, width=0.05)
    rate, std = curve.estimate(6)
    assert rate == 120.0
    assert std == pytest.approx(0.05 * 120 / 1.96)


def test_nothing_known_is_a_neutral_curve_half_as_sure():
    curve = MeasuredCurve(neutral_rate=50.0)
    assert not curve.has_data
    one, std = curve.estimate(1)
    assert (one, std) == (50.0, 25.0)
    assert 300 < curve.estimate(8)[0] < 400
    assert curve.uncertain(range(1, 9)) == tuple(range(8, 0, -1))


def test_a_size_without_throughput_is_worth_nothing_and_does_not_spoil_the_others():
    curve = measured({1: 100.0, 2: 198.0, 4: 0.0, 8: 770.0})
    assert curve.estimate(4) == (0.0, 0.0)
    assert curve.conservative((1, 2, 3, 4, 8)).at(4) == 0.0
    assert curve.estimate(2)[0] == 198.0
    rate, std = curve.estimate(3)
    assert 0 < rate < 198
    assert std == pytest.approx(rate / 2)
    assert measured({4: 0.0}).estimate(8) == (0.0, 0.0)
    assert measured({4: 0.0}).uncertain((1, 2)) == (2, 1)
    assert measured({4: 0.0, 8: 800.0}).uncertain((1, 2)) == (2, 1)


def test_an_unusable_size_is_worth_nothing_and_forgotten():
    curve = measured({2: 200.0, 4: 390.0}).with_unusable(4)
    assert curve.estimate(4) == (0.0, 0.0)
    assert curve.measured_sizes == (2,)
    assert 4 not in curve.uncertain(range(1, 9))


def test_unmeasured_sizes_upwards_are_bid_cautiously_but_never_at_nothing():
    bid = measured({1: 100.0}).conservative((1, 2, 4, 8), kappa=1.0)
    assert bid.at(8) > 0
    assert bid.at(2) < 200 * 0.8


@pytest.mark.skipif(not summit(), reason="the measured curves are not present")
def test_half_of_the_measured_points_predict_the_other_half():
    errors = []
    for points in summit().values():
        curve = measured({k: points[k] for k in (1, 4, 16, 64)})
        errors += [abs(curve.estimate(k)[0] / points[k] - 1) for k in (2, 8, 32)]
    errors.sort()
    assert errors[len(errors) // 2] < 0.03
    assert errors[-1] < 0.16


# --- updating ---


def test_ordinary_observations_sharpen_a_size_and_follow_slow_change():
    rng = random.Random(0)
    curve = measured({4: 100.0}, width=0.1)
    before = curve.estimate(4)[1]
    for i in range(40):
        curve, change = curve.observe(4, rng.gauss(103, 2), 4.0, i * 30.0)
        assert change is None
    rate, std = curve.estimate(4)
    assert abs(rate - 103) < 1.5
    assert std < before / 3


def test_a_drift_is_noticed_and_the_other_sizes_become_uncertain_with_the_old_shape():
    rng = random.Random(0)
    points = {1: 100.0, 2: 195.0, 4: 380.0, 8: 700.0}
    curve = measured(points)
    changes = []
    for i in range(8):
        curve, change = curve.observe(4, rng.gauss(266, 4), 8.0, i * 30.0)
        changes += [change] if change else []
    assert [c.kind for c in changes] == ["drift"]
    assert changes[0].nodes == 4
    assert "has changed from" in changes[0].sentence
    assert curve.estimate(4)[0] == pytest.approx(266, rel=0.03)
    assert curve.estimate(8)[0] == pytest.approx(0.7 * 700, rel=0.03)  # the shape is kept
    assert curve.uncertain((1, 2, 4, 8)) == (8, 2, 1)


def test_one_stalled_window_changes_little():
    curve = measured({4: 100.0})
    for i in range(10):
        curve, _ = curve.observe(4, 100.0, 2.0, i * 30.0)
    after, change = curve.observe(4, 3.0, 2.0, 330.0)
    assert change is None
    assert after.estimate(4)[0] > 97


def test_an_ordinary_observation_at_a_new_size_is_a_point_with_a_wide_interval():
    curve, change = MeasuredCurve().observe(3, 300.0, math.inf, 1.0)
    assert change is None
    assert curve.measured_sizes == (3,)
    assert curve.relative_half_width(3) >= 0.04


def test_a_profile_that_contradicts_an_old_point_replaces_it():
    curve = measured({4: 100.0})
    again = curve.with_measurement(4, 60.0, 1.0, 9.0)
    assert again.estimate(4)[0] == 60.0
    agreeing = curve.with_measurement(4, 101.0, 2.0, 9.0)
    assert 100 < agreeing.estimate(4)[0] < 101


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf])
def test_an_impossible_rate_is_refused_in_a_sentence(rate):
    with pytest.raises(ValueError, match="not a finite number"):
        MeasuredCurve().with_measurement(2, rate, 0.1, 0.0)
    with pytest.raises(ValueError, match="not a finite number"):
        measured({2: 5.0}).observe(2, rate, 0.1, 0.0)


def test_a_job_that_stops_being_silent_at_a_size_is_believed_again():
    curve = measured({4: 0.0})
    for i in range(5):
        curve, _ = curve.observe(4, 0.0, 0.0, float(i))
    assert curve.estimate(4)[0] == 0
    for i in range(8):
        curve, _ = curve.observe(4, 100.0, 2.0, 10.0 + i)
    assert curve.estimate(4)[0] == pytest.approx(100, rel=0.1)


# --- phases ---


def test_another_batch_size_is_another_phase_with_the_shape_of_the_last():
    curve, _ = MeasuredCurve().with_phase("batch=256")
    curve = measured({1: 100.0, 2: 190.0, 4: 340.0}, curve=curve)
    other, change = curve.with_phase("batch=512")
    assert change is not None
    assert change.kind == "phase"
    assert other.estimate(4)[0] == pytest.approx(340)
    assert other.uncertain((1, 2, 4)) == (4, 2, 1)
    other = other.with_measurement(4, 510.0, 5.0, 0.0)
    assert other.estimate(2)[0] == pytest.approx(1.5 * 190, rel=0.01)
    back, _ = other.with_phase("batch=256")
    assert back.estimate(2) == curve.estimate(2)
    assert back.with_phase("batch=256") == (back, None)


def test_phases_do_not_pile_up_for_ever():
    curve = MeasuredCurve()
    for batch in range(100):
        curve, _ = curve.with_phase(f"batch={batch + 1}")
        curve = measured({1: 100.0}, curve=curve)
    assert len(curve.phases) <= 8
    assert curve.phase == "batch=100"


# --- priors ---


def test_a_prior_gives_the_shape_and_one_measurement_gives_the_level():
    prior = Prior(
        tuple((k, linear(k)) for k in (1, 2, 4, 8)), level_std=0.3, shape_std=0.02, source="job 7"
    )
    curve = MeasuredCurve.from_prior(prior)
    assert curve.has_data
    assert curve.estimate(4) == (400.0, pytest.approx(120.0))
    curve = measured({8: 400.0}, curve=curve)
    assert curve.estimate(2)[0] == pytest.approx(100, rel=0.01)
    assert curve.uncertain((1, 2, 4, 8), 0.05) == (2, 1)


def test_a_prior_of_nothing_is_refused():
    with pytest.raises(ValueError, match="job 9"):
        Prior((), 0.1, 0.1, "job 9")
    assert PhaseCurve().as_prior(1.0, 0.1, 0.1, "x") is None


# --- the store ---


def test_a_curve_survives_the_store():
    curve, _ = measured({1: 100.0, 2: 190.0}).with_phase("batch=8")
    curve = measured({2: 150.0}, curve=curve).with_unusable(3)
    restored = MeasuredCurve.from_dict(json.loads(json.dumps(curve.to_dict())))
    assert restored == curve


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.update(version=9),
        lambda d: d.update(phases=[]),
        lambda d: d.pop("unusable"),
        lambda d: d["phases"][0].update(points=[[1, -4.0, 0.0, 1, 0.0]]),
        lambda d: d["phases"][0].update(points=[[0, 4.0, 0.0, 1, 0.0]]),
        lambda d: d["phases"][0].update(points=[["x", 4.0, 0.0, 1, 0.0]]),
        lambda d: d["phases"][0].update(points=[[1, 4.0]]),
        lambda d: d["phases"][0].update(
            prior={"points": [[1, 0.0]], "level_std": 1, "shape_std": 1, "source": "s"}
        ),
    ],
)
def test_a_damaged_stored_curve_is_refused_in_a_sentence(damage):
    stored = measured({1: 100.0}).to_dict()
    damage(stored)
    with pytest.raises(CurveError, match="stored scaling curve"):
        MeasuredCurve.from_dict(stored)


def test_points_of_a_job_that_scales_alike_fill_the_gaps():
    own, other = measured({2: 200.0}), measured({1: 90.0, 2: 170.0, 4: 300.0})
    curve = own.with_points_of(other)
    assert curve.measured_sizes == (1, 2, 4)
    assert curve.estimate(2)[0] == 200.0, "what it measured itself counts"
    assert other.with_points_of(own) is other, "nothing is missing"
    assert own.with_points_of(measured({8: 0.0})) is own, "nothing is known there"
    believing = MeasuredCurve.from_prior(Prior(((1, 50.0),), 0.3, 0.05, "a sibling"))
    assert believing.with_points_of(other) is believing
    assert own.with_phase("batch=64")[0].with_points_of(other).measured_sizes == ()
