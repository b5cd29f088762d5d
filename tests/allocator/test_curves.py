"""Validation, interpolation and extrapolation of scaling curves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from allocator import CurveError, ScalingCurve
from tests.allocator.strategies import curves
from tests.draws import cases


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ((), "no points"),
        (((0, 1.0),), "sizes start at 1"),
        (((1, math.nan),), "throughput nan at 1 nodes"),
        (((1, 1.0), (2, -3.0)), "throughput -3.0 at 2 nodes"),
        (((1, 1.0), (2, math.inf)), "throughput inf at 2 nodes"),
        (((2, 1.0), (1, 1.0)), "lists 1 nodes after 2"),
        (((2, 1.0), (2, 1.0)), "lists 2 nodes after 2"),
    ],
)
def test_a_curve_that_cannot_be_used_is_refused(
    points: tuple[tuple[int, float], ...], says: str
) -> None:
    with pytest.raises(CurveError, match=says):
        ScalingCurve(points)


def test_between_below_and_beyond_its_points() -> None:
    curve = ScalingCurve.of([(8, 50.0), (2, 20.0)])
    assert [curve.at(k) for k in (0, 1, 2, 5, 8, 100)] == [0.0, 10.0, 20.0, 35.0, 50.0, 50.0]
    assert curve.covers(8)
    assert not curve.covers(9)


def test_a_single_point_is_a_curve() -> None:
    curve = ScalingCurve.of({4: 8.0})
    assert [curve.at(k) for k in (1, 4, 5)] == [2.0, 8.0, 8.0]


@given(curves())
@settings(max_examples=cases(100), deadline=None)
def test_arrays_are_read_as_single_sizes_are(curve: ScalingCurve) -> None:
    sizes = np.arange(0, 20)
    assert curve.rates(sizes) == pytest.approx([curve.at(k) for k in sizes.tolist()], rel=1e-12)


@given(curves())
@settings(max_examples=cases(50), deadline=None)
def test_a_curve_made_of_arrays_is_the_same_curve(curve: ScalingCurve) -> None:
    copy = ScalingCurve.from_arrays(*(each.copy() for each in curve.arrays))
    assert copy == curve
    assert hash(copy) == hash(curve)
    assert copy.rates(np.arange(20)).tolist() == curve.rates(np.arange(20)).tolist()


@pytest.mark.parametrize(
    ("sizes", "rates", "says"),
    [
        ([], [], "no points"),
        ([0, 1], [1.0, 2.0], "sizes start at 1"),
        ([1, 2], [1.0, math.nan], "throughput nan at 2 nodes"),
        ([1, 2], [1.0, -3.0], "throughput -3.0 at 2 nodes"),
        ([2, 2], [1.0, 1.0], "lists 2 nodes after 2"),
    ],
)
def test_arrays_that_are_no_curve_are_refused_as_points_are(
    sizes: list[int], rates: list[float], says: str
) -> None:
    with pytest.raises(CurveError, match=says):
        ScalingCurve.from_arrays(np.array(sizes, dtype=np.int64), np.array(rates))


@pytest.mark.parametrize(
    ("points", "useful"),
    [
        ({1: 0.0, 4: 0.0}, 0),
        ({2: 5.0}, 2),
        ({1: 5.0, 4: 5.0, 8: 5.0}, 1),
        ({1: 5.0, 4: 9.0, 8: 7.0}, 4),
        ({3: 0.0, 4: 100.0}, 4),
    ],
)
def test_more_nodes_than_useful_raise_nothing(points: dict[int, float], useful: int) -> None:
    assert ScalingCurve.of(points).useful == useful
