"""A metric as it grows in the store: whose values count, which are new, and what stays of many."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from malletrain.daemon.jobs.repository import (
    MIN_VALUES_PER_METRIC,
    GrowingSeries,
    Value,
    series_views,
)
from malletrain.store.measurement_tables import MAX_POINTS, thinned
from malletrain.store.records import JobRow, MetricRow
from malletrain.store.store import Store
from tests.draws import cases


@pytest.fixture
def store():
    with Store.open("sqlite://") as store:
        store.add_job(JobRow("j1", "train", "ann", "{}", "running"))
        yield store


def values(numbers, *, begin=1.0, nodes=1):
    return [Value(begin + k, float(n), k, 8.0 * k, nodes) for k, n in enumerate(numbers)]


def points_of(store, name="loss"):
    return [(row.number, row.value) for row in store.series.rows("j1", [name])]


def test_values_of_one_rank_are_a_curve(store):
    series = GrowingSeries(store.series, "j1", "loss")
    series.add(1, 0, values([3, 2], begin=10))
    series.add(1, 1, values([9, 9], begin=11))
    series.add(1, 0, values([3, 2, 1], begin=10))
    assert points_of(store) == [(0, 3.0), (1, 2.0), (2, 1.0)], "said twice, and by a higher rank"
    series.add(2, 1, values([0.5], begin=5))
    assert points_of(store)[3:] == [(3, 0.5)], "the next round, on a node whose clock is behind"
    series.add(1, 0, values([7], begin=99))
    assert len(points_of(store)) == 4, "late news of a round that is over"


def test_a_lower_rank_that_is_heard_later_takes_over_its_round(store):
    series = GrowingSeries(store.series, "j1", "loss")
    series.add(1, 0, values([5]))
    series.add(2, 3, values([9, 8, 7], begin=20))
    series.add(2, 0, values([4, 3], begin=20))
    series.add(2, 3, values([6], begin=40))
    assert [value for _, value in points_of(store)] == [5.0, 4.0, 3.0]


def test_after_a_restart_what_was_said_before_is_known(store):
    GrowingSeries(store.series, "j1", "loss").add(1, 0, values([3, 2, 1]))
    again = GrowingSeries(store.series, "j1", "loss")
    again.add(1, 0, values([3, 2, 1, 0]))
    assert points_of(store) == [(0, 3.0), (1, 2.0), (2, 1.0), (3, 0.0)]


def test_what_stays_stored_is_the_same_however_it_came(store):
    names = (f"m{number}" for number in itertools.count())

    @settings(max_examples=cases(20))
    @given(
        st.lists(st.integers(1, 300), min_size=1, max_size=6),
        st.integers(0, 2**32),
        st.sets(st.integers(0, 5)),
    )
    def grown(pieces, seed, restarts):
        chance, name = random.Random(seed), next(names)
        all_values = values([chance.randrange(50) for _ in range(sum(pieces))])
        series, sent = GrowingSeries(store.series, "j1", name), 0
        for turn, size in enumerate(pieces):
            if turn in restarts:
                series = GrowingSeries(store.series, "j1", name)
            series.add(1, 0, all_values[sent : sent + size])
            sent += size
        every = [
            MetricRow("j1", name, k, v.time, v.value, v.step, v.samples, v.nodes)
            for k, v in enumerate(all_values)
        ]
        assert store.series.rows("j1", [name]) == thinned(every, len(every))
        assert len(store.series.rows("j1", [name])) <= MAX_POINTS

    grown()


def test_what_is_shown_of_it(store):
    GrowingSeries(store.series, "j1", "loss").add(1, 0, values(range(300), nodes=2))
    GrowingSeries(store.series, "j1", "b").add(1, 0, values([1]))
    job = store.get_job("j1")
    b, loss = series_views(store.series, job, (), 0.0, 0)
    assert (b.name, b.values, b.nodes, b.count) == ("b", (1.0,), (1,), 1)
    assert (loss.count, len(loss.values), loss.steps[-1], loss.samples[1]) == (300, 300, 299, 8.0)
    (few,) = series_views(store.series, job, ["loss"], 0.0, 20)
    assert len(few.values) <= 20
    assert (few.values[0], few.values[-1], few.count) == (0.0, 299.0, 300)
    (new,) = series_views(store.series, job, ["loss"], 298.5, 0)
    assert new.values == (298.0, 299.0)
    assert MIN_VALUES_PER_METRIC <= MAX_POINTS
