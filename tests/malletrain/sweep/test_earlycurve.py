"""EarlyCurve on curves whose end is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from malletrain.sweep.earlycurve import EarlyCurve, Law
from tests.draws import cases

pytestmark = pytest.mark.slow

LAW = Law(0.002, 0.05, 0.5, 0.3)
STEPS = range(1, 31)


def curve(law: Law, steps=STEPS):
    return [law.at(k - 1) for k in steps]


def test_a_curve_of_this_law_is_predicted_exactly():
    prediction = EarlyCurve().predict(STEPS, curve(LAW), 100)
    assert prediction is not None
    assert prediction.value == pytest.approx(LAW.at(99), abs=1e-6)
    assert prediction.high - prediction.low < 1e-5


def test_its_parameters_are_found():
    law = EarlyCurve().fit([k - 1 for k in STEPS], curve(LAW))
    for name in ("a0", "a1", "a2", "a3"):
        assert getattr(law, name) == pytest.approx(getattr(LAW, name), rel=1e-4)


@given(st.floats(-4, -1.5), st.floats(-2, 0), st.floats(-0.5, 0.5), st.floats(-1, 2), st.booleans())
@settings(deadline=None, max_examples=cases(30))
def test_any_curve_of_this_law_is_predicted(a0, a1, a2, a3, upside_down):
    law = Law(10**a0, 10**a1, 10**a2, a3)
    sign = -1 if upside_down else 1
    prediction = EarlyCurve("maximize" if upside_down else "minimize").predict(
        STEPS, [sign * y for y in curve(law)], 60
    )
    assert prediction is not None
    amplitude = law.at(0) - law.a3
    assert sign * prediction.value == pytest.approx(law.at(59), abs=0.01 * amplitude)
    assert prediction.low <= prediction.value <= prediction.high


def test_the_interval_holds_the_truth_about_as_often_as_it_says(any_seed):
    rng = np.random.default_rng(any_seed(5))
    hits = 0
    for _ in range(60):
        law = Law(*10 ** rng.uniform([-4, -2, -0.5], [-2, -0.5, 0.5]), rng.uniform(0, 1))
        noisy = np.array(curve(law)) + rng.normal(0, 0.01, len(STEPS))
        prediction = EarlyCurve(confidence=0.9).predict(STEPS, noisy, 100)
        assert prediction is not None
        hits += prediction.low <= law.at(99) <= prediction.high
    assert hits >= 40  # 54 are due; the law is not linear in its parameters


TWO = [1.2 / (1 + 0.3 * k) + 0.8 for k in range(20)] + [
    0.4 / (1 + 0.3 * k) + 0.3 for k in range(12)
]
"""The learning rate was divided at step 20."""
END = 0.4 / (1 + 0.3 * 40) + 0.3


def test_a_stage_that_begins_is_noticed():
    prediction = EarlyCurve().predict(range(32), TWO, 60)
    assert prediction is not None
    assert prediction.stages == (0, 20)
    assert prediction.value == pytest.approx(END, abs=1e-4)


def test_a_curve_that_rises_is_one_that_falls_upside_down():
    prediction = EarlyCurve("maximize").predict(range(32), [1 - y for y in TWO], 60)
    assert prediction is not None
    assert prediction.stages == (0, 20)
    assert prediction.value == pytest.approx(1 - END, abs=1e-4)


def test_stages_that_are_given():
    prediction = EarlyCurve(stages=[20]).predict(range(32), TWO, 60)
    one = EarlyCurve(stages=[]).predict(range(32), TWO, 60)
    assert prediction is not None
    assert one is not None
    assert prediction.stages == (0, 20)
    assert one.stages == (0,)
    assert abs(prediction.value - END) < abs(one.value - END)


def test_noise_is_no_stage():
    rng = np.random.default_rng(1)
    prediction = EarlyCurve().predict(STEPS, np.array(curve(LAW)) + rng.normal(0, 0.02, 30), 100)
    assert prediction is not None
    assert prediction.stages == (1,)


def test_too_little_to_say_anything():
    assert EarlyCurve().predict([1, 2], [3.0, 2.0], 9) is None
    assert EarlyCurve(stages=[20]).predict(range(22), TWO[:22], 60) is None
    assert EarlyCurve().predict(range(5), [1.0, math.nan, 1, 1, 1], 9) is None


def test_three_points_make_a_curve_and_no_interval():
    law = Law(0.0, 0.2, 0.5, 0.3)
    prediction = EarlyCurve().predict([4, 12, 36], [law.at(k - 4) for k in (4, 12, 36)], 108)
    assert prediction is not None
    assert prediction.value == pytest.approx(law.at(104), abs=1e-3)
    assert (prediction.low, prediction.high) == (-math.inf, math.inf)


def test_a_flat_curve_stays_flat():
    prediction = EarlyCurve().predict(range(10), [0.5] * 10, 50)
    assert prediction is not None
    assert prediction.value == pytest.approx(0.5, abs=1e-3)


def test_bounds_bound_the_prediction():
    rising = [0.1, 0.5, 0.7, 0.85, 0.95]
    prediction = EarlyCurve("maximize", bounds=(0.0, 1.0)).predict(range(5), rising, 10**6)
    assert prediction is not None
    assert prediction.high <= 1.0
    assert prediction.value <= 1.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: EarlyCurve("up"), "direction is"),  # type: ignore[arg-type]
        (lambda: EarlyCurve(confidence=1.0), "confidence is a share"),
        (lambda: EarlyCurve().predict([1, 1], [1.0, 1.0], 5), "steps that increase"),
        (lambda: EarlyCurve().predict([1], [1.0, 1.0], 5), "as many values as steps"),
    ],
)
def test_misuse(call, words):
    with pytest.raises(ValueError, match=words):
        call()
