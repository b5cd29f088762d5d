"""What ordinary progress and ordinary rescales teach ever after."""

from __future__ import annotations

import pytest

from malletrain.core.events import (
    Progressed,
    RescaleCostMeasured,
)
from tests.malletrain.core.profiled_world import UP, amdahl, profiled_job, world


def test_ordinary_progress_goes_on_correcting_the_curve_and_a_drift_is_measured_again():
    w = world(4, profiled_job(high=4))
    w.until_profiled("a")
    w.run(120)
    assert not w.of("curve-changed")
    seen = w.scaling_models["a"].curve.current.at(4).observations
    assert seen > 1
    w.rates["a"] = lambda k: 0.6 * amdahl(k)
    w.epoch["a"] += 1
    w.up("a", w.epoch["a"], 4, "same")
    w.run(600, until=lambda: w.of("curve-changed"))
    assert w.of("curve-changed")[0].data["change"] == "drift"
    w.run(600, until=lambda: len(w.of("profile-finished")) == 2)
    for k in range(1, 5):
        assert w.controller.jobs["a"].scaling.curve.estimate(k)[0] == pytest.approx(
            0.6 * amdahl(k), rel=0.1
        )


def test_what_a_rescale_costs_is_learnt():
    w = world(4, profiled_job(high=4))
    w.until_profiled("a")
    w.run(20)
    cost = w.controller.jobs["a"].cost
    assert cost.down_s < 3.5, "five rescales of 1.5 s speak louder than the configured 8 s"
    assert cost.up_s == pytest.approx((10 + UP) / 2)
    w.do(RescaleCostMeasured("a", "sideways", 1.0))
    w.do(RescaleCostMeasured("a", "up", float("nan")))
    assert w.controller.jobs["a"].cost == cost


def test_senseless_progress_changes_nothing():
    w = world(4, profiled_job(high=4))
    w.run(20)
    before = w.controller.jobs["a"].scaling
    for time, samples in ((float("nan"), 1.0), (w.now, float("inf")), (w.now, -5.0)):
        w.do(Progressed("a", len(w.controller.jobs["a"].nodes), time, samples))
    w.do(Progressed("nobody", 4, w.now, 1.0))
    assert w.controller.jobs["a"].scaling is before
