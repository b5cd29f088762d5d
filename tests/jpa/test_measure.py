"""Measurement of one size: stopping rule, accuracy and robustness.

Quantiles of Student's t, against scipy.stats.t.ppf.
"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpa.measure import MeasureConfig, MeasurementState, Monitor, ThroughputMeter, t975, t995

TRUE_RATE = 160.0
STEP = 32.0


def watch(meter, durations, until=400.0):
    """Feed one report per step until the meter stops; return (outcome, time)."""
    time = samples = 0.0
    for seconds in durations:
        time += seconds
        samples += STEP
        outcome = meter.feed(time, samples)
        if outcome is not MeasurementState.MEASURING:
            return outcome, time
        if time > until:
            break
    return meter.state(time), time


def steps(rng, scatter=0.05, correlation=0.0, slow_first=0, stall_at=None, stall=0.0):
    """Endless step durations averaging STEP / TRUE_RATE, optionally correlated, slow at first or
    with one stall.
    """
    state, mean, elapsed, count = 0.0, STEP / TRUE_RATE, 0.0, 0
    while True:
        state = correlation * state + math.sqrt(1 - correlation**2) * rng.gauss(0, 1)
        seconds = mean * math.exp(scatter * state - scatter**2 / 2)
        if count < slow_first:
            seconds *= 4
        if stall_at is not None and elapsed > stall_at:
            seconds, stall_at = seconds + stall, None
        elapsed += seconds
        count += 1
        yield seconds


CASES = {
    # name: (steps, share of runs within 5 % of the truth, seconds the median run may take)
    "regular": ({"scatter": 0.01}, 1.0, 6),
    "scattered": ({"scatter": 0.1}, 0.95, 10),
    "very scattered": ({"scatter": 0.3}, 0.9, 60),
    "correlated": ({"scatter": 0.05, "correlation": 0.8}, 0.85, 30),
    "slow at first": ({"slow_first": 8}, 0.95, 15),
    "one stall of 3 s": ({"stall_at": 3.0, "stall": 3.0}, 0.9, 15),
}


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_near_the_truth_and_soon(name):
    kind, share, most_seconds = CASES[name]
    errors, times, runs = [], [], 60
    for seed in range(runs):
        meter = ThroughputMeter(4, 0.0)
        _, time = watch(meter, steps(random.Random(seed), **kind))
        errors.append(abs(meter.measurement(time).rate / TRUE_RATE - 1))
        times.append(time)
    assert sum(e < 0.05 for e in errors) >= share * runs
    assert sorted(times)[runs // 2] <= most_seconds


def test_the_interval_covers_the_truth_as_often_as_it_says():
    covered, runs = 0, 100
    for seed in range(runs):
        meter = ThroughputMeter(4, 0.0)
        _, time = watch(meter, steps(random.Random(seed), scatter=0.1))
        measurement = meter.measurement(time)
        covered += abs(measurement.rate - TRUE_RATE) <= measurement.half_width
    assert covered >= 90


def test_a_stable_measurement_says_what_it_rests_on():
    meter = ThroughputMeter(6, 0.0)
    outcome, time = watch(meter, steps(random.Random(0)))
    m = meter.measurement(time)
    assert outcome is MeasurementState.STABLE
    assert m.stable
    assert m.nodes == 6
    assert m.half_width <= 0.05 * m.rate
    assert m.samples == pytest.approx(m.rate * m.seconds)
    assert time >= meter.config.min_seconds


def test_minima_and_maxima_hold():
    slow = ThroughputMeter(1, 0.0, MeasureConfig(min_samples=2000))
    watch(slow, steps(random.Random(0), scatter=0.001))
    assert slow.measurement(0.0).samples >= 2000
    patient = ThroughputMeter(1, 0.0, MeasureConfig(min_seconds=20))
    assert watch(patient, steps(random.Random(0), scatter=0.001))[1] >= 20
    few = ThroughputMeter(1, 0.0, MeasureConfig(max_samples=100))
    outcome, time = watch(few, steps(random.Random(0), scatter=0.5))
    assert outcome is MeasurementState.UNSTABLE
    assert time < 3
    wild = ThroughputMeter(1, 0.0, MeasureConfig(max_seconds=15))
    outcome, time = watch(wild, steps(random.Random(0), scatter=1.0))
    assert outcome is MeasurementState.UNSTABLE
    assert 15 <= time < 20
    assert wild.measurement(time).half_width > 0.05 * wild.measurement(time).rate


def test_a_silent_job_is_unknown_after_the_longest_time_and_not_before():
    meter = ThroughputMeter(3, 100.0, MeasureConfig(max_seconds=30))
    assert meter.state(129.9) is MeasurementState.MEASURING
    assert meter.state(130.0) is MeasurementState.UNKNOWN
    assert meter.measurement(130.0).rate == 0


def test_a_job_that_reports_without_progress_is_unknown_too():
    meter = ThroughputMeter(3, 0.0, MeasureConfig(max_seconds=30))
    outcomes = [meter.feed(float(t), 64.0) for t in range(1, 31)]
    assert outcomes[-1] is MeasurementState.UNKNOWN
    assert MeasurementState.STABLE not in outcomes


def test_a_job_with_very_long_steps_gives_a_crude_estimate_without_an_interval():
    meter = ThroughputMeter(3, 0.0, MeasureConfig(max_seconds=60))
    for i in range(1, 3):
        assert meter.feed(25.0 * i, 100.0 * i) is MeasurementState.MEASURING
    assert meter.state(60.0) is MeasurementState.UNSTABLE
    m = meter.measurement(60.0)
    assert m.rate == pytest.approx(4.0)
    assert m.half_width == math.inf
    assert not m.stable


def test_a_job_that_stops_for_good_is_not_measured_as_if_it_ran():
    meter = ThroughputMeter(2, 0.0, MeasureConfig(min_seconds=10, max_seconds=40))
    for i in range(1, 30):
        meter.feed(i * 0.2, i * STEP)
    assert meter.state(20.0) is MeasurementState.MEASURING
    assert meter.state(40.0) is MeasurementState.UNSTABLE
    assert meter.measurement(40.0).rate < 0.5 * TRUE_RATE


def test_a_counter_that_goes_back_starts_the_measurement_anew():
    meter = ThroughputMeter(2, 0.0)
    for i in range(1, 20):
        meter.feed(i * 0.2, 1000 + i * 7.0)
    for i in range(1, 100):
        outcome = meter.feed(4.0 + i * 0.2, 500 + i * STEP)
        if outcome is not MeasurementState.MEASURING:
            break
    assert meter.measurement(4.0 + i * 0.2).rate == pytest.approx(TRUE_RATE)


def test_late_and_repeated_reports_are_ignored():
    meter = ThroughputMeter(2, 10.0)
    meter.feed(9.0, 5000.0)  # from before the rescale
    for i in range(1, 60):
        meter.feed(10 + i * 0.2, i * STEP)
        meter.feed(10 + i * 0.2, i * STEP)
        meter.feed(10 + (i - 1) * 0.2, (i - 1) * STEP)
    assert meter.measurement(10 + 59 * 0.2).rate == pytest.approx(TRUE_RATE)


@pytest.mark.parametrize(
    ("time", "samples"), [(math.nan, 1.0), (1.0, math.nan), (1.0, math.inf), (1.0, -5.0)]
)
def test_impossible_reports_are_refused_in_a_sentence(time, samples):
    with pytest.raises(ValueError, match="progress report"):
        ThroughputMeter(1, 0.0).feed(time, samples)


@pytest.mark.parametrize(
    "limits",
    [
        {"tolerance": 0.0},
        {"tolerance": 1.5},
        {"min_seconds": 70.0},
        {"warmup_s": 60.0},
        {"max_samples": 3, "min_samples": 9},
        {"min_batches": 1},
    ],
)
def test_limits_that_contradict_each_other_are_refused(limits):
    with pytest.raises(ValueError, match=r"\."):
        MeasureConfig(**limits)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-10, 100), st.floats(0, 1e9)), max_size=60))
def test_any_series_of_reports_gives_finite_non_negative_numbers(reports):
    meter = ThroughputMeter(1, 0.0, MeasureConfig(min_seconds=1))
    for time, samples in reports:
        meter.feed(time, samples)
    m = meter.measurement(100.0)
    assert m.rate >= 0
    assert math.isfinite(m.rate)
    assert m.half_width >= 0
    assert m.samples >= 0
    assert m.seconds >= 0


def test_very_many_reports_are_thinned_out_and_change_nothing():
    meter = ThroughputMeter(1, 0.0, MeasureConfig(min_seconds=50))
    _, time = watch(meter, (s / 100 for s in steps(random.Random(0), scatter=0.2)), until=60)
    assert meter.measurement(time).rate == pytest.approx(100 * TRUE_RATE, rel=0.02)


def test_the_monitor_gives_one_observation_a_window_and_none_across_a_change():
    monitor, seen, time, samples = Monitor(window_s=10.0), [], 0.0, 0.0
    for nodes, phase, seconds in ((4, "a", 35.0), (2, "a", 25.0), (2, "b", 15.0)):
        end = time + seconds
        while time < end:
            time += 0.2
            samples += STEP * nodes / 4
            m = monitor.feed(time, samples, nodes, phase)
            if m is not None:
                seen.append((nodes, phase, round(m.rate, 3)))
    assert seen == [(4, "a", TRUE_RATE)] * 3 + [(2, "a", TRUE_RATE / 2)] * 2 + [
        (2, "b", TRUE_RATE / 2)
    ]


def test_the_monitor_says_nothing_of_a_silent_window():
    monitor = Monitor(window_s=5.0)
    assert all(monitor.feed(float(t), 10.0, 2, "a") is None for t in range(40))


@pytest.mark.parametrize(
    ("degrees", "at_975", "at_995"),
    [
        (1, 12.706, 63.657),
        (1.9, 12.706, 63.657),
        (4, 2.776, 4.604),
        (12.99, 2.179, 3.055),
        (30, 2.042, 2.750),
        (30.9, 2.042, 2.750),
        (31, 1.960, 2.576),
        (1e9, 1.960, 2.576),
    ],
)
def test_quantiles(degrees, at_975, at_995):
    assert (t975(degrees), t995(degrees)) == (at_975, at_995)


def test_below_one_degree_the_interval_is_that_of_one():
    assert t975(0.5) == t975(1)


def test_an_interval_is_never_wider_with_more_data():
    for quantile in (t975, t995):
        values = [quantile(degrees) for degrees in range(1, 60)]
        assert values == sorted(values, reverse=True)
