"""Goodput: Pollux's statistical efficiency, the batch that follows from the noise, and what plans
give to jobs whose batch follows it.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator import NodeInfo, ScalingCurve
from jpa import MeasuredCurve
from malletrain.core.commands import BatchAdvised
from malletrain.core.events import BatchReported
from malletrain.core.goodput import (
    MIN_ADVANTAGE,
    BatchState,
    best_batch,
    goodput,
    stated_batch,
    statistical_efficiency,
)
from malletrain.core.planning import Candidate, make_plan
from malletrain.core.pools import Pool
from malletrain.core.settings import PlanningSettings
from tests.malletrain.core.profiled_world import profiled_job, world

BASE, MOST = 64, 1024


def noisy(noise_scale, current=BASE, base=BASE, most=MOST):
    return BatchState(base, current, most, noise_scale)


def step_s(nodes, batch):
    """An all-reduce that takes as long as 50 samples."""
    return 1e-3 * batch / nodes + 0.05 * (nodes - 1) / nodes + 0.005


def rate(nodes, batch=BASE):
    return batch / step_s(nodes, batch)


def measured(batches, sizes=range(1, 9)):
    """A curve that was measured at these batches, the last one now; the first is the base."""
    curve = MeasuredCurve().of_one_law()
    for batch in batches:
        ratio = batch / BASE
        curve, _ = curve.with_phase("default" if ratio == 1 else f"batch x{ratio:.3g}")
        for k in sizes:
            curve = curve.with_measurement(k, rate(k, batch), 1e-3 * rate(k, batch), 0.0)
    return curve


@pytest.mark.parametrize(
    ("batch", "noise_scale", "efficiency"),
    [
        (64, 0.0, 1.0),
        (128, 0.0, 0.5),
        (512, 0.0, 0.125),
        (128, 64.0, 2 / 3),
        (512, 448.0, 512 / 960),
        (1024, 1e9, 1.0),
        (1024, math.inf, 1.0),
        (64, math.inf, 1.0),
    ],
)
def test_the_statistical_efficiency_of_pollux(batch, noise_scale, efficiency):
    assert statistical_efficiency(batch, BASE, noise_scale) == pytest.approx(efficiency, rel=1e-6)


@given(st.integers(1, 1000), st.integers(0, 5000), st.integers(0, 5000), st.floats(0, 1e9))
def test_it_falls_with_the_batch_and_never_below_the_ratio(base, above, more, noise_scale):
    batch = base + above
    efficiency = statistical_efficiency(batch, base, noise_scale)
    assert base / batch * (1 - 1e-9) <= efficiency <= 1
    assert statistical_efficiency(batch + more, base, noise_scale) <= efficiency * (1 + 1e-9)


@pytest.mark.parametrize(
    ("state", "sizes"),
    [
        (noisy(0.0), (64, 128, 256, 512, 1024)),
        (noisy(0.0, most=600), (64, 128, 256, 512, 600)),
        (noisy(0.0, most=64), (64,)),
        (noisy(0.0, base=3, most=13), (3, 6, 12, 13)),
        (BatchState(64, 512), (64,)),
    ],
)
def test_the_batches_that_a_job_may_choose(state, sizes):
    assert state.sizes == sizes


def true_gain(state):
    return lambda k, ratio: rate(k, ratio * state.current) / rate(k, state.current)


@pytest.mark.parametrize(
    ("state", "nodes", "batch"),
    [
        (noisy(0.0), 8, 64),  # samples beyond the base batch bring nothing
        (noisy(64.0), 1, 64),
        (noisy(64.0), 8, 128),
        (noisy(512.0), 1, 64),
        (noisy(512.0), 8, 512),
        (noisy(4096.0), 1, 64),
        (noisy(4096.0), 4, 1024),
        (noisy(4096.0), 8, 1024),
        (noisy(1e15), 8, 1024),
        (noisy(0.0, current=1024), 8, 64),
        (noisy(256.0, current=512), 8, 512),  # 256 would be better by less than 5 %
        (noisy(1e15, current=2048), 8, 1024),  # above the largest
    ],
)
def test_the_batch_with_the_highest_goodput(state, nodes, batch):
    assert best_batch(nodes, state, true_gain(state))[0] == batch


@pytest.mark.parametrize("nodes", [2, 4, 8, 16])
@pytest.mark.parametrize("noise_scale", [100.0, 1000.0, 10_000.0])
def test_it_is_the_one_next_to_the_optimum_in_closed_form(nodes, noise_scale):
    """m / (a + b·m/k) / (φ + m) is highest at m = √(φ·a·k/b)."""
    state = noisy(noise_scale, base=1, current=1, most=2**20)
    optimum = math.sqrt(noise_scale * step_s(nodes, 0) * nodes / 1e-3)
    batch, _ = best_batch(nodes, state, true_gain(state))
    assert optimum / math.sqrt(2) <= batch <= optimum * math.sqrt(2)


@given(
    st.integers(1, 64), st.floats(0, 1e6), st.sampled_from((64, 128, 512, 1024)), st.integers(0, 3)
)
def test_no_other_batch_is_better_by_more_than_the_advantage(nodes, noise_scale, current, more):
    state = noisy(noise_scale, current)
    batch, relative = best_batch(nodes, state, true_gain(state))
    own = rate(nodes, batch) * state.efficiency(batch)
    assert relative * rate(nodes, current) == pytest.approx(own)
    for other in state.sizes:
        assert rate(nodes, other) * state.efficiency(other) <= own * MIN_ADVANTAGE * (1 + 1e-9)
    # following the advice does not change it
    followed = noisy(noise_scale, batch)
    assert best_batch(nodes, followed, true_gain(followed))[0] == batch
    assert best_batch(nodes + more, followed, true_gain(followed))[0] >= batch // 2


def test_a_change_of_the_batch_keeps_the_noise():
    assert BatchState(64, 128).after(None) == BatchState(64, 128)
    assert BatchState(64, 128).after(BatchState(64, 64)) == BatchState(64, 128)
    assert BatchState(64, 128).after(noisy(99.0)) == noisy(99.0, current=128)
    assert noisy(50.0).after(noisy(99.0, current=128)) == noisy(50.0)


def test_a_batch_that_the_script_sets_has_no_goodput():
    curve = ScalingCurve.of({1: 10.0, 2: 15.0})
    assert goodput(curve, BatchState(64, 512), lambda *_: 2.0) is curve


def test_goodput_is_the_best_throughput_times_efficiency_over_all_batches():
    curve, state = measured([64, 128]), noisy(512.0, 128)
    by_scale = goodput(curve.conservative(range(1, 9), 0.0), state, curve.batch_gain)
    for k in range(1, 9):
        best = max(rate(k, m) * state.efficiency(m) for m in state.sizes)
        assert best / 1.08 <= by_scale.at(k) <= best * 1.03


def test_without_known_throughput_at_other_batches_the_present_one_counts():
    curve, state = ScalingCurve.of({1: 10.0, 2: 15.0}), noisy(64.0, 128)
    assert goodput(curve, state, None).at(2) == pytest.approx(15.0 * 2 / 3)
    assert MeasuredCurve().of_one_law().batch_gain is None
    assert measured([64]).batch_gain is not None


def nodes_of(noise_scale, current=BASE):
    """Nodes of a job at this noise, of 8 for which a job with perfect scaling bids too."""
    curve = measured([64, 128] if current != BASE else [128, 64])
    state = noisy(noise_scale, current)
    worth = goodput(curve.conservative(range(1, 9), 0.0), state, curve.batch_gain)
    other = ScalingCurve.of((k, 0.3 * k * rate(1)) for k in range(1, 9))
    candidates = [
        Candidate("noisy", 1, 8, (), curve=worth),
        Candidate("other", 1, 8, (), curve=other),
    ]
    nodes = {f"n{i}": NodeInfo(Pool("default")) for i in range(8)}
    plan = make_plan(candidates, nodes, PlanningSettings())
    return len(plan.nodes["noisy"])


def test_a_job_with_little_noise_stops_growing_where_its_samples_lose_worth():
    by_noise = [nodes_of(noise) for noise in (0.0, 64.0, 256.0, 1024.0, 1e9)]
    assert by_noise == sorted(by_noise)
    assert by_noise[0] <= 2
    assert by_noise[-1] >= 6


def test_a_job_whose_noise_is_gone_loses_the_nodes_that_its_large_batch_had():
    assert nodes_of(1e9, current=128) > nodes_of(0.0, current=128) == nodes_of(0.0)


@pytest.mark.parametrize(
    ("facts", "batch"),
    [
        ({"base": 64, "current": 64, "most": None, "noise_scale": None}, BatchState(64, 64)),
        ({"base": 64, "current": 128, "most": 512, "noise_scale": 99.5}, noisy(99.5, 128, 64, 512)),
        ({"base": 64, "current": 64, "most": 512, "noise_scale": None}, BatchState(64, 64)),
        ({"base": 64, "current": 64, "most": 512, "noise_scale": -1.0}, BatchState(64, 64)),
        ({"base": 64, "current": 64, "most": 8, "noise_scale": 1}, noisy(1.0, 64, 64, 64)),
        ({"base": 0, "current": 64}, None),
        ({"base": True, "current": 64}, None),
        ({"base": 64, "current": "64"}, None),
        ({"base": 64, "current": 2**50}, None),
        ({}, None),
    ],
)
def test_what_an_agent_reports_is_checked(facts, batch):
    assert stated_batch(facts) == batch


# --- the controller ---


def trained(w, job, batch):
    """The job trains with this batch, and its steps take as long as :func:`step_s`."""
    w.batches[job] = float(batch)
    w.rates[job] = lambda k: rate(k, batch)
    w.epoch[job] += 1
    w.up(job, w.epoch[job], len(w.running[job]), "same")


def profiled_by_law():
    w = world(6)
    w.do(profiled_job(high=6))
    w.rates["a"] = rate
    w.do(BatchReported("a", BatchState(BASE, BASE)))
    w.until_profiled("a")
    return w


def test_another_stated_batch_makes_no_profile_and_is_predicted_at_all_scales():
    w = profiled_by_law()
    for batch in (128, 256, 512):
        w.do(BatchReported("a", BatchState(BASE, batch)))
        assert w.controller.jobs["a"].scaling.curve.phase == f"batch x{batch // BASE}"
        trained(w, "a", batch)
        w.run(120)
    job = w.controller.jobs["a"]
    assert len(w.of("profile-finished")) == 1
    assert [a.data["change"] for a in w.of("curve-changed")] == ["batch"] * 3
    assert job.scaling.profiled
    curve = job.scaling.curve
    assert curve.phase == "batch x8"
    for k in range(1, 7):
        assert curve.estimate(k)[0] == pytest.approx(rate(k, 512), rel=0.1)
    assert MeasuredCurve.from_dict(curve.to_dict()).one_law


def test_a_batch_that_changes_during_the_profile_is_one_profile():
    w = world(6)
    w.do(profiled_job(high=6))
    w.rates["a"] = rate
    w.do(BatchReported("a", BatchState(BASE, BASE)))
    w.run(600, until=lambda: w.of("profile-point"))
    w.do(BatchReported("a", BatchState(BASE, 128)))
    trained(w, "a", 128)
    w.until_profiled("a")
    w.run(120)
    assert len(w.of("profile-finished")) == 1
    curve = w.controller.jobs["a"].scaling.curve
    assert curve.phase == "batch x2"
    for k in range(1, 7):
        assert curve.estimate(k)[0] == pytest.approx(rate(k, 128), rel=0.15)


def test_another_batch_that_nobody_states_is_profiled():
    w = world(6)
    w.do(profiled_job(high=6))
    w.rates["a"] = rate
    w.until_profiled("a")
    trained(w, "a", 128)
    w.run(1500, until=lambda: len(w.of("profile-finished")) == 2)
    assert [a.data["change"] for a in w.of("curve-changed")] == ["phase"]


def advice(w, event):
    return [c for c in w.controller.handle(event, w.now) if isinstance(c, BatchAdvised)]


def test_the_bids_of_a_job_are_goodput_once_its_noise_is_known():
    w = profiled_by_law()
    job = w.controller.jobs["a"]
    assert job.goodput is None
    w.run(30)
    plans = w.controller.plans
    w.do(BatchReported("a", noisy(1e9)))
    assert job.goodput.at(6) / job.goodput.at(1) > 1.5 * job.curve.at(6) / job.curve.at(1)
    w.run(5)
    assert w.controller.plans == plans + 1
    w.do(BatchReported("a", noisy(0.99e9)))  # the same goodput follows from it
    w.run(5)
    assert w.controller.plans == plans + 1
    assert advice(w, BatchReported("a", BatchState(BASE, 128))) == [], "it goes where it should"
    assert job.batch == noisy(0.99e9, current=128)
    w.do(BatchReported("a", noisy(0.0)))
    assert job.goodput.at(6) == pytest.approx(job.curve.at(6))
    w.do(BatchReported("nobody", noisy(0.0)))


def test_the_batch_that_suits_its_nodes_is_advised_to_a_job():
    w = profiled_by_law()
    w.run(30)
    nodes = len(w.controller.jobs["a"].nodes)
    assert not advice(w, BatchReported("a", BatchState(BASE, BASE)))
    assert advice(w, BatchReported("a", noisy(1e9))) == [BatchAdvised("a", MOST)]
    assert not advice(w, BatchReported("a", noisy(0.99e9)))
    assert advice(w, BatchReported("a", noisy(0.0))) == [BatchAdvised("a", BASE)]
    w.do(BatchReported("a", noisy(1e9)))
    w.take(sorted(w.running["a"])[0])
    w.run(60, until=lambda: w.running["a"] and "a" not in w.rescaling)
    assert len(w.running["a"]) == nodes - 1
    again = [command for command in w.advised if command.job == "a"]
    assert again[-1] == BatchAdvised("a", MOST), "its first node may be another one"
