"""A series keeps the whole story in bounded memory."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from malletrain.web.history import ThinnedSeries


@given(st.lists(st.floats(0, 1e6), max_size=400), st.integers(4, 50))
@example([float(k) for k in range(400)], 4)
def test_it_is_bounded_in_order_and_reaches_from_the_first_to_the_newest(times, most):
    series = ThinnedSeries(most)
    for k, time in enumerate(sorted(times)):
        series.add(time, float(k))
    points = series.points()
    assert len(points) <= most + 1
    assert points == sorted(points)
    if times:
        assert points[0] == (min(times), 0.0)
        assert points[-1] == (max(times), float(len(times) - 1))


def test_regular_points_stay_regular():
    series = ThinnedSeries(100)
    for second in range(10_000):
        series.add(float(second), 0.0)
    times = [time for time, _ in series.points()]
    gaps = [b - a for a, b in pairwise(times)]
    assert len(times) > 40
    assert max(gaps[:-1]) <= 2 * min(gaps[:-1])


def test_what_is_older_than_the_newest_is_left_out():
    series = ThinnedSeries()
    series.add(2.0, 1.0)
    series.add(1.0, 5.0)
    assert series.points() == [(2.0, 1.0)]
