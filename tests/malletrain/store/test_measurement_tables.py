"""A long series stays bounded, and what is kept of it does not depend on how it came."""

import math
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from malletrain.store.measurement_tables import thinned, width

VALUES = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=120)


class Point(NamedTuple):
    number: int
    value: float


def points(values):
    return [Point(number, value) for number, value in enumerate(values)]


def grown(values, pieces, most):
    """The series that is stored when the values arrive piece by piece, as at the daemon."""
    series, count = [], 0
    for size in pieces:
        piece = points(values)[count : count + size]
        count += len(piece)
        series = thinned([*series, *piece], count, most) if piece else series
    rest = points(values)[count:]
    return thinned([*series, *rest], len(values), most) if rest else series


@given(VALUES, st.integers(4, 30))
def test_few_are_kept_and_among_them_the_first_the_last_and_the_extremes(values, most):
    series = thinned(points(values), len(values), most)
    assert len(series) <= most
    assert set(series) <= set(points(values))
    assert series == sorted(series)
    assert (series[0].number, series[-1].number) == (0, len(values) - 1)
    shown = [point.value for point in series]
    assert (min(shown), max(shown)) == (min(values), max(values))


def test_a_value_that_is_no_number_stays():
    values = [float(number % 7) for number in range(2000)]
    values[777] = math.nan
    values[1234] = math.inf
    shown = [point.value for point in thinned(points(values), len(values), 50)]
    assert any(map(math.isnan, shown))
    assert math.inf in shown


@given(VALUES, st.lists(st.integers(1, 40)), st.integers(4, 30))
@example([1.0, 0.0, 0.0, 2.0, 2.0, 0.0], [1, 1, 1, 1, 1, 1], 4)
def test_it_makes_no_difference_whether_values_come_at_once_or_in_pieces(values, pieces, most):
    assert grown(values, pieces, most) == thinned(points(values), len(values), most)


@pytest.mark.parametrize(
    ("count", "wide"), [(0, 1), (1, 1), (498, 1), (499, 4), (996, 4), (997, 8), (10**9, 2**22)]
)
def test_the_width_follows_from_how_many_there_are(count, wide):
    """Two of each bucket, with the first and the newest 500 at most."""
    assert width(count) == wide


def test_few_are_kept_as_they_are():
    assert thinned(points([3.0, 1.0, 2.0]), 3) == points([3.0, 1.0, 2.0])
