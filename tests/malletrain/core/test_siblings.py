"""What the curve of one job tells of others."""

from __future__ import annotations

import pytest

from jpa import MeasuredCurve, ModelSize, Prior, RescaleCosts
from malletrain.core import siblings
from malletrain.core.events import (
    JobCancelled,
    JobCompleted,
    JobSubmitted,
    PriorSuggested,
)
from malletrain.core.scaling_model import ScalingModel
from malletrain.core.siblings import SharedCurves, Sibling
from malletrain.sim.model_jobs import Memory
from tests.malletrain.core.profiled_world import ProfiledWorld, amdahl, profiled_job, world


def test_a_job_of_a_known_kind_is_not_profiled_again():
    w = world(4, profiled_job(high=4))
    w.until_profiled("a")
    w.do(JobCompleted("a"))
    first = w.scaling_models["a"]
    w.do(profiled_job("b", high=4, scaling=ScalingModel(curve=first.curve, costs=first.costs)))
    w.run(60)
    assert w.result("b") == "measured"
    assert w.of("profile-finished", "b")[0].data["visited"] == []
    assert w.sizes["b"] == [4]


def test_of_jobs_of_one_kind_submitted_at_once_only_the_first_is_measured():
    w = ProfiledWorld(6)
    for name, kind in (("a", "k"), ("b", "k"), ("other", "l"), ("c", "k")):
        w.do(profiled_job(name, kind=kind))
    w.join()
    for name in ("a", "b", "other", "c"):
        w.until_profiled(name)
    assert w.of("profile-finished", "a")[0].data["visited"] == [6, 5, 4, 3, 2, 1]
    for name in ("b", "c"):
        assert w.of("profile-finished", name)[0].data["visited"] == []
        assert not w.of("profile-started", name)
        for k in range(1, 7):
            assert w.controller.jobs[name].curve.at(k) == pytest.approx(amdahl(k), rel=0.05)
    assert w.of("profile-finished", "other")[0].data["visited"], "another kind is measured"
    w.do(profiled_job("late", kind="k"))
    w.until_profiled("late")
    assert w.of("profile-finished", "late")[0].data["visited"] == []


def test_what_was_measured_of_a_trial_that_is_given_up_the_next_one_need_not():
    w = ProfiledWorld(6)
    for name in "ab":
        w.do(profiled_job(name, kind="k"))
    w.join()
    while len(w.of("profile-point", "a")) < 3:
        w.run(1)
    w.do(JobCancelled("a"))
    w.until_profiled("b")
    assert w.of("profile-finished", "b")[0].data["visited"] == [3, 2, 1]


def test_a_kind_measured_at_small_sizes_only_leaves_the_larger_ones_to_the_next():
    w = ProfiledWorld(6)
    w.do(profiled_job("a", high=3, kind="k"))
    w.do(profiled_job("b", high=6, kind="k"))
    w.join()
    w.until_profiled("a")
    w.until_profiled("b")
    assert w.of("profile-finished", "a")[0].data["visited"] == [3, 2, 1]
    assert w.of("profile-finished", "b")[0].data["visited"] == [5, 4], "a keeps its last node"


def suggested() -> ScalingModel:
    """What a sibling of the right shape and a quarter too high a level tells."""
    return ScalingModel(
        curve=MeasuredCurve.from_prior(
            Prior(tuple((k, amdahl(k)) for k in (1, 2, 4, 6)), 0.3, 0.04, "a sibling")
        )
    )


def test_a_sibling_found_late_is_believed_until_it_is_measured():
    w = ProfiledWorld(6)
    w.do(JobSubmitted("b", 6, 6))
    w.join()
    w.run(5)
    w.do(profiled_job())
    w.do(PriorSuggested("a", suggested()))
    assert w.controller.jobs["a"].curve.at(4) == pytest.approx(amdahl(4), rel=0.05)
    w.do(PriorSuggested("a", ScalingModel()))
    assert w.controller.jobs["a"].curve is not None


def test_a_sibling_found_while_the_profile_runs_saves_the_visits_it_makes_needless():
    w = world(6, profiled_job())
    w.rates["a"] = lambda k: 0.8 * amdahl(k)
    w.run(100, until=lambda: w.advisor.profiling == "a" and w.sizes.get("a") == [6])
    w.do(PriorSuggested("a", suggested()))
    w.until_profiled("a")
    visited = w.of("profile-finished", "a")[0].data["visited"]
    assert visited[0] == 6
    assert len(visited) < 6, "the shape is known"
    assert w.result("a") == "measured"
    for k in range(1, 7):
        assert w.controller.jobs["a"].scaling.curve.estimate(k)[0] == pytest.approx(
            0.8 * amdahl(k), rel=0.1
        )
    before = w.controller.jobs["a"].scaling
    w.do(PriorSuggested("a", suggested()))
    assert w.controller.jobs["a"].scaling is before, "once is enough"


def test_a_sibling_spares_no_size_that_the_user_asked_for():
    w = world(6, profiled_job(profile_sizes=(6, 3, 1)))
    w.run(100, until=lambda: w.advisor.profiling == "a")
    w.do(PriorSuggested("a", suggested()))
    w.until_profiled("a")
    assert w.of("profile-finished", "a")[0].data["visited"] == [6, 3, 1]


# --- the pure piece by itself ---


def measured(rates, **more) -> ScalingModel:
    curve = MeasuredCurve()
    for nodes, rate in rates.items():
        curve = curve.with_measurement(nodes, rate, 0.01 * rate, 0.0)
    return ScalingModel(curve, RescaleCosts(7.0, 5.0, 9.0), **more)


ALL = {1: 100.0, 2: 190.0, 4: 340.0}


@pytest.mark.parametrize(
    ("key", "scaling", "expected"),
    [
        ("k", measured(ALL, profiled=True), True),
        ("k", measured(ALL, result="partial"), True),
        ("k", measured(ALL), False),
        ("k", measured({1: 0.0}, profiled=True), False),
        ("k", ScalingModel(profiled=True), False),
        ("", measured(ALL, profiled=True), False),
    ],
)
def test_what_was_profiled_and_measured_is_kept(key, scaling, expected):
    memory = Memory()
    siblings.keep(memory, Sibling(key, "a", scaling))
    assert (memory.of_key(key) is not None) is expected


def test_the_next_of_a_key_starts_a_little_less_sure_and_with_its_costs():
    memory = Memory()
    siblings.keep(memory, Sibling("k", "a", measured(ALL, profiled=True)))
    model = siblings.starts_with(memory, "k")
    assert model.curve.measured_sizes == (1, 2, 4)
    assert model.curve.estimate(2)[1] > measured(ALL).curve.estimate(2)[1]
    assert (model.costs, model.profiled) == (RescaleCosts(7.0, 5.0, 9.0), False)
    assert siblings.starts_with(memory, "other") is None


def test_of_jobs_that_only_their_owner_calls_alike_the_shape_is_told_and_nothing_is_measured():
    memory = Memory()
    siblings.keep(memory, Sibling("k", "a", measured(ALL, profiled=True)))
    model = siblings.starts_with(memory, "k", named=True)
    assert model.curve.measured_sizes == ()
    assert model.curve.estimate(2)[0] == pytest.approx(190.0, rel=0.01)


@pytest.mark.parametrize(("parameters", "near"), [(2e6, True), (1e9, False)])
def test_a_model_of_similar_size_suggests_its_shape(parameters, near):
    memory = Memory()
    siblings.keep(memory, Sibling("k", "a", measured(ALL, profiled=True), ModelSize(1e6)))
    model = siblings.suggested(memory, "other", ModelSize(parameters), RescaleCosts())
    assert (model is not None) is near
    assert siblings.suggested(memory, "k", ModelSize(1e6), RescaleCosts()) is None, "its own"


def test_a_job_is_told_once_of_each_new_curve_of_its_kind():
    shared, own = SharedCurves(), MeasuredCurve()
    shared.remember("k", measured({4: 340.0}).curve)
    curve = shared.tell("b", "k", own)
    assert curve.measured_sizes == (4,)
    assert shared.tell("b", "k", own) is own
    assert shared.tell("c", "l", own) is own
    shared.remember("k", measured({1: 100.0}).curve)
    assert shared.tell("b", "k", curve).measured_sizes == (1, 4), "with what was known before"
