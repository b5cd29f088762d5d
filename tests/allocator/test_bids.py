"""Valid and invalid bids.

Values of sizes, compared with the formulas of section 7 of the design by hand.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator import (
    Bid,
    BidError,
    ExtrapolationPolicy,
    Goal,
    RescaleCost,
    ScalingCurve,
    SizeValues,
    make_bid,
    multiples,
    powers_of_two,
)
from tests.allocator.strategies import curves
from tests.draws import cases


@pytest.mark.parametrize(
    ("sizes", "values", "says"),
    [
        ([1, 2], [1.0], "2 sizes but 1 values"),
        ([0, 1], [0.0, 1.0], "sizes start at 1"),
        ([2, 1], [1.0, 1.0], "strictly increasing"),
        ([2, 2], [1.0, 1.0], "strictly increasing"),
        ([1.5], [1.0], "whole numbers"),
        ([3], [math.nan], "value at 3 nodes is nan"),
        ([1, 4], [1.0, math.inf], "value at 4 nodes is inf"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    sizes: list[int], values: list[float], says: str
) -> None:
    with pytest.raises(BidError, match=says):
        SizeValues(sizes, values)


@pytest.mark.parametrize("idle", [math.nan, math.inf])
def test_an_idle_value_is_finite_or_minus_infinity(idle: float) -> None:
    with pytest.raises(BidError, match="bid of job a values no nodes"):
        Bid("a", {}, idle)


def test_options_are_values() -> None:
    one, same, other = (
        SizeValues([1, 3], [1.0, 2.0]),
        SizeValues(np.array([1, 3]), np.array([1.0, 2.0])),
        SizeValues([1, 3], [1.0, 2.5]),
    )
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one.value(3) == 2.0
    assert one.value(2) is None


def test_options_do_not_change_with_the_arrays_they_were_made_of() -> None:
    sizes, values = np.array([1, 2]), np.array([1.0, 2.0])
    options = SizeValues(sizes, values)
    sizes[0], values[0] = 7, 9.0
    assert options == SizeValues([1, 2], [1.0, 2.0])
    with pytest.raises(ValueError, match="read-only"):
        options.values[0] = 3.0


CURVE = ScalingCurve.of({1: 10.0, 2: 18.0, 4: 30.0})
COST = RescaleCost(up_s=20.0, down_s=10.0, start_s=30.0)


def values(bid: Bid, pool: str = "default") -> dict[int, float]:
    options = bid.options[pool]
    return dict(zip(options.sizes.tolist(), options.values.tolist(), strict=True))


@pytest.mark.parametrize(
    ("current", "expected", "nothing"),
    [
        # Starting costs the new throughput times 30 s.
        (0, {1: 70 * 10.0, 2: 70 * 18.0, 3: 70 * 24.0, 4: 70 * 30.0}, 0.0),
        # Growing from 1 costs 10/s times 20 s.
        (1, {1: 1000.0, 2: 1800 - 200.0, 3: 2400 - 200.0, 4: 3000 - 200.0}, -100.0),
        # Shrinking from 3 costs 24/s times 10 s, growing 24/s times 20 s.
        (3, {1: 1000 - 240.0, 2: 1800 - 240.0, 3: 2400.0, 4: 3000 - 480.0}, -240.0),
    ],
)
def test_value_is_time_times_throughput_less_what_the_change_costs(
    current: int, expected: dict[int, float], nothing: float
) -> None:
    bid = make_bid("a", CURVE, current=current, max_nodes=4, t_fwd_s=100.0, cost=COST)
    assert values(bid) == pytest.approx(expected)
    assert bid.idle_value == pytest.approx(nothing)


def test_workers_that_restart_anyway_pay_for_staying() -> None:
    bid = make_bid("a", CURVE, current=2, max_nodes=4, t_fwd_s=100.0, cost=COST, broken=True)
    assert values(bid)[2] == pytest.approx(1800 - 180.0)


def test_weight_multiplies_everything() -> None:
    plain = make_bid("a", CURVE, current=2, max_nodes=4, cost=COST)
    heavy = make_bid("a", CURVE, current=2, max_nodes=4, cost=COST, weight=2.5)
    assert values(heavy) == pytest.approx({k: 2.5 * v for k, v in values(plain).items()})


def test_efficiency_counts_single_node_seconds() -> None:
    light, heavy = CURVE, ScalingCurve.of({1: 1.0, 2: 1.8, 4: 3.0})
    bids = [
        make_bid("a", curve, current=2, max_nodes=4, cost=COST, goal=Goal.EFFICIENCY)
        for curve in (light, heavy)
    ]
    assert values(bids[0]) == pytest.approx(values(bids[1]))
    assert values(bids[0])[2] == pytest.approx(120.0 * 1.8)


def test_efficiency_without_speed_on_one_node_uses_the_first_size_that_has_any() -> None:
    curve = ScalingCurve.of({1: 0.0, 4: 20.0, 8: 30.0})
    bid = make_bid(
        "a",
        curve,
        max_nodes=8,
        goal=Goal.EFFICIENCY,
        t_fwd_s=100.0,
        cost=RescaleCost(0.0, 0.0, 0.0),
    )
    assert values(bid)[8] == pytest.approx(100.0 * 30.0 / (20.0 / 4))
    dead = make_bid("b", ScalingCurve.of({2: 0.0}), max_nodes=2, goal=Goal.EFFICIENCY)
    assert values(dead) == {1: 0.0, 2: 0.0}


def test_another_class_is_a_fresh_start() -> None:
    gpu = ScalingCurve.of({1: 100.0})
    bid = make_bid(
        "a",
        {"cpu": CURVE, "gpu": gpu},
        current=2,
        current_pool="cpu",
        max_nodes=1,
        t_fwd_s=100.0,
        cost=COST,
    )
    assert values(bid, "gpu") == pytest.approx({1: 70 * 100.0})
    assert values(bid, "cpu") == pytest.approx({1: 1000 - 180.0})


def test_must_run_is_an_idle_value_of_minus_infinity() -> None:
    assert make_bid("a", CURVE, max_nodes=4, must_run=True).idle_value == -math.inf


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (None, [3, 4, 5, 6, 7, 8, 9]),
        (powers_of_two(64), [4, 8]),
        (multiples(3, 64), [3, 6, 9]),
        ([7, 3, 100, 7], [3, 7]),
    ],
)
def test_allowed_sizes(allowed: tuple[int, ...] | None, expected: list[int]) -> None:
    curve = ScalingCurve.of({1: 1.0, 64: 64.0})
    bid = make_bid("a", curve, min_nodes=3, max_nodes=9, allowed=allowed)
    assert bid.options["default"].sizes.tolist() == expected


@pytest.mark.parametrize(
    ("largest", "expected"), [(0, ()), (1, (1,)), (7, (1, 2, 4)), (8, (1, 2, 4, 8))]
)
def test_powers_of_two(largest: int, expected: tuple[int, ...]) -> None:
    assert powers_of_two(largest) == expected


def test_beyond_the_curve_nothing_is_silent() -> None:
    bid = make_bid("a", CURVE, max_nodes=6, t_fwd_s=100.0, cost=COST)
    assert values(bid)[6] == values(bid)[4]
    assert bid.notes == (
        "the curve of job a ends at 4 nodes; size 5 to 6 is valued at the throughput of 4 nodes.",
    )
    dropped = make_bid("a", CURVE, max_nodes=5, extrapolation=ExtrapolationPolicy.DROP)
    assert sorted(values(dropped)) == [1, 2, 3, 4]
    assert dropped.notes == ("the curve of job a ends at 4 nodes; size 5 is not offered.",)
    with pytest.raises(BidError, match="curve of job a ends at 4 nodes but size 5 is asked for"):
        make_bid("a", CURVE, max_nodes=5, extrapolation=ExtrapolationPolicy.ERROR)
    assert make_bid("a", CURVE, max_nodes=4).notes == ()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"min_nodes": 0}, "job|Job a asks for 0:4"),
        ({"min_nodes": 5}, "Job a asks for 5:4"),
        ({"current": -1}, "has -1 current nodes"),
        ({"weight": -1.0}, "weight -1.0"),
        ({"weight": math.nan}, "weight nan"),
        ({"t_fwd_s": 0.0}, "forward-looking time is 0.0"),
        ({"t_fwd_s": math.inf}, "forward-looking time is inf"),
        ({"allowed": [5, 6]}, "None of the sizes that job a accepts lies within 1:4"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(BidError, match=says):
        make_bid("a", CURVE, **{"max_nodes": 4, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_a_cost_that_makes_no_sense_is_refused(seconds: float) -> None:
    with pytest.raises(BidError, match="down_s is"):
        RescaleCost(down_s=seconds)


@given(curves(), st.integers(0, 16))
@settings(max_examples=cases(200), deadline=None)
def test_the_value_of_staying_is_the_throughput_alone(curve: ScalingCurve, current: int) -> None:
    bid = make_bid("a", curve, current=current, max_nodes=16, t_fwd_s=100.0, cost=COST)
    for size, value in values(bid).items():
        if size == current:
            assert value == pytest.approx(100.0 * curve.at(size))
        else:
            assert value <= 100.0 * curve.at(size) + 1e-9
