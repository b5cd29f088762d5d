"""The ladder of sizes and the order of visits."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpa.curve import MeasuredCurve
from jpa.profile import PlanConfig, elasticity, ladder, new_plan, next_size, next_step
from tests.jpa.models import fixed_global_batch, linear

ALL = PlanConfig(skip_interpolated=False)


def walk(law, plan, curve=None, nodes=10**6, width=0.02):
    """Visit every size the plan asks for; ``nodes`` may be a function of the number of visits so
    far.
    """
    curve, sizes = curve or MeasuredCurve(), []
    while True:
        available = nodes(len(sizes)) if callable(nodes) else nodes
        size = next_size(plan, curve, available)
        if size is None:
            return sizes, curve
        sizes.append(size)
        plan = plan.with_requested(size).with_visited(size)
        curve = curve.with_measurement(size, law(size), width * law(size), 0.0)
        assert len(sizes) < 1000


# --- the ladder ---


@pytest.mark.parametrize(
    ("args", "steps", "expected"),
    [
        ((1, 6), 8, (6, 5, 4, 3, 2, 1)),
        ((3, 3), 8, (3,)),
        ((1, 64), 8, (64, 35, 20, 11, 6, 3, 2, 1)),
        ((1, 64), 3, (64, 8, 1)),
        ((1, 64, (1, 2, 4, 8, 16, 32, 64)), 8, (64, 32, 16, 8, 4, 2, 1)),
        ((4, 100, (1, 8, 50, 200)), 8, (50, 8)),
        ((2, 64), 1, (64,)),
    ],
)
def test_ladder(args, steps, expected):
    assert ladder(*args, max_steps=steps) == expected


@settings(deadline=None)
@given(
    st.integers(1, 200),
    st.integers(0, 5000),
    st.integers(2, 20),
    st.none() | st.sets(st.integers(1, 3000), min_size=1),
)
def test_any_ladder_descends_from_end_to_end_within_its_length(low, span, steps, allowed):
    high = low + span
    usable = [
        k
        for k in (range(low, high + 1) if allowed is None else sorted(allowed))
        if low <= k <= high
    ]
    if not usable:
        with pytest.raises(ValueError, match=r"nodes\."):
            ladder(low, high, allowed, max_steps=steps)
        return
    sizes = ladder(low, high, allowed, max_steps=steps)
    assert sizes[0] == usable[-1]
    assert sizes[-1] == usable[0]
    assert len(sizes) == len(usable) if len(usable) <= steps else 2 <= len(sizes) <= steps
    assert all(a > b for a, b in pairwise(sizes))
    assert set(sizes) <= set(usable)


@pytest.mark.parametrize("limits", [(0, 4), (5, 4), (-1, 3)])
def test_limits_that_make_no_sense_are_refused(limits):
    with pytest.raises(ValueError, match="minimum"):
        ladder(*limits)


# --- the way down ---


def test_a_few_sizes_are_all_visited_from_the_largest_down():
    sizes, _ = walk(linear, new_plan(1, 6, MeasuredCurve(), config=ALL))
    assert sizes == [6, 5, 4, 3, 2, 1]


def test_on_a_straight_curve_sizes_that_interpolation_will_know_are_passed_over():
    sizes, curve = walk(linear, new_plan(1, 6, MeasuredCurve()))
    assert sizes[0] == 6
    assert sizes[-1] == 1
    assert len(sizes) < 6
    assert curve.uncertain(range(1, 7)) == ()


@pytest.mark.parametrize(
    "law",
    [linear, fixed_global_batch(0.1), fixed_global_batch(0.5), fixed_global_batch(0.02, 0.01)],
)
@pytest.mark.parametrize("limits", [(1, 6), (2, 16), (1, 64)])
@pytest.mark.parametrize("config", [PlanConfig(), ALL])
def test_the_curve_afterwards_is_within_five_percent_everywhere(law, limits, config):
    sizes, curve = walk(law, new_plan(*limits, MeasuredCurve(), config=config))
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) <= config.max_steps
    for k in range(limits[0], limits[1] + 1):
        assert curve.estimate(k)[0] == pytest.approx(law(k), rel=0.05)


def test_steps_are_finer_where_the_curve_bends():
    def plateau(k):
        return 100.0 * min(k, 24)

    straight, _ = walk(linear, new_plan(1, 64, MeasuredCurve(), config=ALL))
    bent, _ = walk(plateau, new_plan(1, 64, MeasuredCurve(), config=ALL))
    assert len(bent) > len(straight)
    assert sum(k >= 10 for k in bent) > sum(k >= 10 for k in straight)
    assert len(bent) <= 8


def test_a_known_curve_is_not_measured_again():
    _, curve = walk(linear, new_plan(1, 6, MeasuredCurve(), config=ALL))
    step = next_step(new_plan(1, 6, curve), curve, 6)
    assert step.size is None
    assert "7.5%" in step.reason


def test_only_what_is_uncertain_is_visited():
    curve = MeasuredCurve()
    for k in (6, 5, 4):
        curve = curve.with_measurement(k, linear(k), 0.01 * linear(k), 0.0)
    sizes, _ = walk(linear, new_plan(1, 6, curve, config=ALL), curve)
    assert sizes
    assert max(sizes) < 4


def test_a_size_at_which_the_script_crashed_is_left_out():
    sizes, _ = walk(
        linear,
        new_plan(1, 6, MeasuredCurve().with_unusable(5), config=ALL),
        MeasuredCurve().with_unusable(5),
    )
    assert sizes == [6, 4, 3, 2, 1]


def test_a_script_that_crashes_everywhere_leaves_nothing_to_profile():
    curve = MeasuredCurve(unusable=frozenset({1, 2}))
    with pytest.raises(ValueError, match="crashed at every size"):
        new_plan(1, 2, curve)


def test_the_users_own_ladder_is_taken_as_it_is():
    sizes, _ = walk(linear, new_plan(1, 64, MeasuredCurve(), requested_sizes=(2, 7, 31)))
    assert sizes == [31, 7, 2]
    with pytest.raises(ValueError, match="sizes to profile"):
        new_plan(1, 4, MeasuredCurve(), requested_sizes=(9,))


def test_what_a_step_says_of_its_size_and_of_the_end():
    plan = new_plan(1, 2, MeasuredCurve(), requested_sizes=(1, 2))
    larger = MeasuredCurve().with_measurement(2, 200.0, 2.0, 0.0)
    step = next_step(plan.with_requested(2).with_visited(2), larger, 2)
    assert (step.size, step.reason) == (1, "1 node: the next size down.")
    over = next_step(plan, larger.with_measurement(1, 100.0, 1.0, 0.0), 2)
    assert over.size is None
    assert over.reason == "Every size that was asked for has been measured."


def test_with_fewer_nodes_it_starts_at_the_largest_that_can_be_had_even_off_the_ladder():
    plan = new_plan(1, 64, MeasuredCurve(), config=ALL)
    assert 50 not in plan.rungs
    assert next_size(plan, MeasuredCurve(), 50) == 50


def test_with_too_few_nodes_there_is_nothing_and_a_sentence():
    step = next_step(new_plan(4, 8, MeasuredCurve()), MeasuredCurve(), 3)
    assert step.size is None
    assert "needs 4 nodes" in step.reason


def test_a_preemption_in_the_middle_of_a_size_goes_on_with_the_nodes_left():
    plan, curve = new_plan(1, 6, MeasuredCurve(), config=ALL), MeasuredCurve()
    plan = plan.with_requested(6)  # not measured yet, and two nodes go
    assert next_size(plan, curve, 4) == 4
    long_plan = new_plan(1, 64, MeasuredCurve(), config=ALL).with_requested(64)
    assert next_size(long_plan, curve, 45) == 45


def test_nodes_that_come_back_cause_no_second_scale_up():
    plan, curve = (
        new_plan(1, 6, MeasuredCurve(), config=ALL).with_requested(6).with_requested(4),
        MeasuredCurve(),
    )
    assert next_size(plan, curve, 6) == 4


def test_a_throughput_of_zero_at_some_size_does_not_stop_the_plan():
    sizes, curve = walk(
        lambda k: 0.0 if k in (6, 4) else linear(k), new_plan(1, 6, MeasuredCurve(), config=ALL)
    )
    assert sizes == [6, 5, 4, 3, 2, 1]
    assert curve.estimate(4)[0] == 0


def test_elasticity():
    curve = (
        MeasuredCurve()
        .with_measurement(2, 200.0, 0.0, 0.0)
        .with_measurement(4, 400.0, 0.0, 0.0)
        .with_measurement(8, 400.0, 0.0, 0.0)
    )
    assert elasticity(curve, 2, 4) == pytest.approx(1)
    assert elasticity(curve, 4, 8) == pytest.approx(0)
    assert elasticity(MeasuredCurve().with_measurement(1, 0.0, 0.0, 0.0), 1, 2) is None


@settings(deadline=None)
@given(
    st.integers(1, 20),
    st.integers(0, 200),
    st.lists(st.floats(0, 1e5), min_size=8, max_size=8),
    st.lists(st.integers(0, 250), min_size=4, max_size=4),
    st.booleans(),
)
def test_whatever_the_curve_and_the_preemptions_it_only_goes_down_and_ends(
    low, span, rates, nodes, bridge
):
    high = low + span
    plan = new_plan(low, high, MeasuredCurve(), config=PlanConfig(skip_interpolated=bridge))
    sizes, _ = walk(
        lambda k: rates[int(math.log2(k))],
        plan,
        nodes=lambda visits: min(nodes[: visits + 1], default=0) if visits < 4 else min(nodes),
    )
    assert all(a > b for a, b in pairwise(sizes))
    assert all(low <= k <= high for k in sizes)
    assert len(sizes) <= 8 + 1  # a preemption may add a size that is on no rung


@pytest.mark.parametrize(
    "bad", [{"max_steps": 0}, {"refine_steps": 8}, {"tolerance": 0.0}, {"max_bend": 0.0}]
)
def test_a_configuration_that_cannot_work_is_refused(bad):
    with pytest.raises(ValueError, match=r"cannot work|share between"):
        PlanConfig(**bad)
