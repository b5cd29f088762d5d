"""Profile keys, and priors from the curves of other jobs."""

import math

import pytest

from jpa.curve import MeasuredCurve
from jpa.profile import new_plan, next_size
from jpa.reuse import (
    ModelSize,
    StoredCurve,
    inherit_curve,
    prior_from,
    profile_key,
    relevant_arguments,
)
from tests.jpa.models import fixed_global_batch

SCRIPT = b"import torch\n"


def key(script=SCRIPT, arguments=("--batch", "32"), node_class="gpu", nproc=4, **more):
    return profile_key(script, arguments, node_class, nproc, **more)


def test_the_same_job_has_the_same_key_whatever_does_not_matter():
    base = key()
    assert base == key(arguments=("--batch=32",))
    assert base == key(
        arguments=("--batch", "32", "--seed", "7", "--lr", "-1e-3", "--output-dir", "/somewhere")
    )
    assert key(arguments=("--a", "1", "--b", "2")) == key(arguments=("--b", "2", "--a", "1"))


@pytest.mark.parametrize(
    "other",
    [
        {"script": b"import torch  # changed\n"},
        {"arguments": ("--batch", "64")},
        {"arguments": ("--batch", "32", "data")},
        {"node_class": "cpu"},
        {"nproc": 2},
        {"user_key": "sweep"},
    ],
)
def test_whatever_changes_the_speed_changes_the_key(other):
    assert key(**other) != key()


def test_a_user_key_stands_for_script_and_arguments_but_not_for_the_nodes():
    assert key(b"one", ("--x",), user_key="sweep") == key(b"two", (), user_key="sweep")
    assert key(user_key="sweep", nproc=1) != key(user_key="sweep")
    assert key(user_key="sweep") != key(user_key="other")


def test_parts_of_a_key_do_not_run_together():
    assert key(arguments=("ab", "c")) != key(arguments=("a", "bc"))
    assert key(node_class="gpu1", nproc=1) != key(node_class="gpu", nproc=11)


def test_arguments_that_matter():
    assert relevant_arguments(["train", "--seed", "3", "-v", "--amp", "--n", "-5", "end"]) == [
        "--amp=",
        "--n=-5",
        "-v=",
        "train",
        "end",
    ]
    assert relevant_arguments(["--mine", "1", "--batch", "2"], ignored={"--mine"}) == ["--batch=2"]


LAW = fixed_global_batch(0.05)


UNSIZED = ModelSize()


def stored(size=UNSIZED, name="sweep", sizes=(1, 2, 4, 8)):
    curve = MeasuredCurve()
    for k in sizes:
        curve = curve.with_measurement(k, LAW(k), 0.02 * LAW(k), 0.0)
    return StoredCurve(name, curve, size, "7")


def test_a_resubmitted_job_measures_nothing_again():
    again = inherit_curve(stored().curve)
    assert again.estimate(4)[0] == LAW(4)
    assert again.estimate(4)[1] > stored().curve.estimate(4)[1]
    plan = new_plan(1, 8, again, allowed=(1, 2, 4, 8))
    assert next_size(plan, again, 8) is None


def test_a_sibling_of_a_sweep_measures_less_than_a_stranger():
    def visits(curve):
        plan, count = new_plan(1, 8, curve, allowed=(1, 2, 4, 8)), 0
        while (size := next_size(plan, curve, 8)) is not None:
            rate = 1.2 * LAW(size)
            curve = curve.with_measurement(size, rate, 0.02 * rate, 0.0)
            plan, count = plan.with_requested(size).with_visited(size), count + 1
        return count, curve

    prior = prior_from([stored()], "sweep")
    assert prior is not None
    siblings, learnt = visits(MeasuredCurve.from_prior(prior))
    strangers, _ = visits(MeasuredCurve())
    assert siblings < strangers
    for k in range(1, 9):
        assert learnt.estimate(k)[0] == pytest.approx(1.2 * LAW(k), rel=0.05)


def test_a_larger_model_is_expected_to_be_slower_and_is_believed_less():
    small, large = ModelSize(1e6, 1e9), ModelSize(2e6, 2e9)
    same = prior_from([stored(small)], "other", small)
    bigger = prior_from([stored(small)], "other", large)
    assert same is not None
    assert bigger is not None
    assert same.rate(1) == pytest.approx(LAW(1))
    assert bigger.rate(1) == pytest.approx(LAW(1) / 2, rel=0.05)
    assert bigger.level_std > same.level_std
    assert bigger.shape_std > same.shape_std
    assert "job 7" in bigger.source


def test_with_parameters_alone_the_level_follows_their_root():
    prior = prior_from([stored(ModelSize(1e6))], "other", ModelSize(4e6))
    assert prior is not None
    assert prior.rate(1) == pytest.approx(LAW(1) / 2, rel=0.05)


def test_the_nearest_sibling_counts():
    near, far = stored(ModelSize(1e6, 1e9)), stored(ModelSize(6e6, 6e9))
    prior = prior_from([far, near], "k", ModelSize(1.1e6, 1.1e9))
    assert prior is not None
    assert prior.rate(1) == pytest.approx(LAW(1) / 1.1, rel=0.05)


@pytest.mark.parametrize(
    "candidates",
    [
        [],
        [stored(name="x")],  # another key, sizes unknown
        [stored(ModelSize(1e6), name="x")],  # far too small
        [StoredCurve("sweep", MeasuredCurve())],  # nothing measured
        [StoredCurve("sweep", MeasuredCurve().with_measurement(2, 0.0, 0.0, 0.0))],
    ],
)
def test_without_a_near_sibling_there_is_no_prior(candidates):
    assert prior_from(candidates, "sweep", ModelSize(1e9)) is None


def test_sizes_of_zero_say_nothing():
    prior = prior_from([stored(ModelSize(0, 0))], "sweep", ModelSize(1e6, 0))
    assert prior is not None
    assert math.isclose(prior.rate(2), LAW(2))


def test_passed_on_from_job_to_job_a_curve_stays_as_sure():
    first = inherit_curve(MeasuredCurve().with_measurement(4, 100.0, 2.0, 0.0))
    assert first.estimate(4)[1] > 1.02
    assert inherit_curve(inherit_curve(first)) == first


def test_a_sibling_measured_at_small_sizes_only_says_little_of_large_ones():
    barely = MeasuredCurve().with_measurement(1, 100.0, 1.0, 0.0)
    well = MeasuredCurve()
    for k in (1, 8, 64):
        well = well.with_measurement(k, 100.0 * k, float(k), 0.0)
    uncertain = {}
    for name, curve in (("barely", barely), ("well", well)):
        prior = prior_from(
            [StoredCurve("k", curve, ModelSize(1e6, 1e9), "j")], "other", ModelSize(1e6, 1e9)
        )
        curve = MeasuredCurve.from_prior(prior).with_measurement(1, 90.0, 1.0, 0.0)
        uncertain[name] = curve.relative_half_width(64)
        assert next_size(new_plan(1, 64, curve), curve, 64) == 64, (
            "the level of a sibling is not believed that far"
        )
    assert uncertain["barely"] > 0.3
    assert uncertain["barely"] > 2 * uncertain["well"]
