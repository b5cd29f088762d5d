"""A series keeps the whole story in bounded memory."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from malletrain.web.history import STACKED, SeenHistory, ThinnedSeries
from tests.malletrain.render.forty import job


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


def test_shares_of_a_step_are_kept_where_they_are_measured():
    history = SeenHistory()
    shares = {"data": 0.4, "computing": 0.5, "others": 0.1}
    running = msgspec.structs.replace(job(32), ended=None, nodes=("n1",))
    history.feed([running], 10.0)
    history.feed([msgspec.structs.replace(running, step_shares=shares)], 12.0)
    view = history.view(running.id)
    assert [point[0] for point in view.points] == [10.0, 12.0]
    assert view.parts == STACKED
    assert view.steps == [(12.0, 0.4, 0.1, 0.0, 0.0, 0.5)]
    assert history.view("j999").steps == []
