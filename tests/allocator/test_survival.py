"""Expected losses of nodes, compared with values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator import Cohort, LossForecast, NodeInfo, ScalingCurve, make_bid, solve

LINEAR = ScalingCurve.of({1: 10.0, 64: 640.0})
SURE = Cohort((0.0, 1000.0), (1.0, 1.0))


def ends_at(seconds: float) -> Cohort:
    return Cohort((0.0, seconds, seconds + 1e-6), (1.0, 1.0, 0.0))


def of(forecast: LossForecast, size: int) -> tuple[float, float, float]:
    undisturbed_s, loss_probability, remaining = forecast.expected_loss(np.array([size]))
    return float(undisturbed_s[0]), float(loss_probability[0]), float(remaining[0])


def test_nodes_that_stay_are_left_alone():
    assert of(LossForecast([(SURE, 3), (None, 2)], 100.0, 30.0), 4) == (100.0, 0.0, 4.0)


def test_no_node_known_is_no_reason_to_fear():
    assert of(LossForecast([], 100.0, 30.0), 4) == (100.0, 0.0, 4.0)


def test_a_job_is_hit_by_the_first_cohort_that_ends():
    forecast = LossForecast([(SURE, 4), (ends_at(50.0), 2)], 100.0, 30.0)
    assert of(forecast, 4) == (100.0, 0.0, 4.0)
    undisturbed_s, loss_probability, remaining = of(forecast, 6)
    assert undisturbed_s == pytest.approx(50.0, abs=13.0)  # by a rule of eight points
    assert (loss_probability, remaining) == (1.0, 4.0)


def test_independent_cohorts_multiply():
    half = Cohort((0.0, 100.0), (1.0, 0.5))
    forecast = LossForecast([(half, 1), (Cohort((0.0, 100.0), (1.0, 0.5)), 1)], 100.0, 0.0)
    assert of(forecast, 1)[1] == pytest.approx(0.5)
    assert of(forecast, 2)[1] == pytest.approx(0.75)
    assert of(forecast, 2)[2] == pytest.approx(1.0)  # one of the two


@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 9)), min_size=1, max_size=6),
    st.floats(1.0, 1e4),
)
def test_more_nodes_are_never_safer(cohorts, window_s):
    in_cohorts = [(Cohort((0.0, window_s), (1.0, s)), n) for s, n in cohorts]
    sizes = np.arange(1, sum(n for _, n in cohorts) + 3)
    undisturbed_s, loss_probability, remaining = LossForecast(
        in_cohorts, window_s, 30.0
    ).expected_loss(sizes)
    assert (np.diff(undisturbed_s) <= 1e-9 * window_s).all()
    assert (np.diff(loss_probability) >= -1e-12).all()
    assert (remaining >= 0).all()
    assert (remaining <= sizes).all()


def bid(forecast: LossForecast | None, current: int):
    loss_forecasts = None if forecast is None else {"default": forecast}
    return make_bid(
        "a", LINEAR, current=current, max_nodes=8, t_fwd_s=120.0, loss_forecasts=loss_forecasts
    )


def test_nodes_that_stay_leave_the_bid_as_it_was():
    sure = LossForecast([(SURE, 8)], 120.0, 30.0)
    for current in (0, 3):
        assert bid(sure, current).options["default"].values == pytest.approx(
            bid(None, current).options["default"].values
        )


def test_a_job_does_not_grow_onto_nodes_that_are_about_to_go():
    soon = LossForecast([(SURE, 4), (ends_at(20.0), 4)], 120.0, 30.0)
    later = LossForecast([(SURE, 4), (ends_at(500.0), 4)], 120.0, 30.0)
    assert solve([bid(soon, 4)], {"default": 8}).sizes["a"] == ("default", 4)
    assert solve([bid(later, 4)], {"default": 8}).sizes["a"] == ("default", 8)


def test_what_is_foretold_leaves_the_rest_of_a_node_as_it_was():
    info = NodeInfo("gpu", 10.0, "rack").with_forecast(99.0, SURE)
    assert info == NodeInfo("gpu", 99.0, "rack", SURE)
