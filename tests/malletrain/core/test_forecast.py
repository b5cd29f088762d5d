"""Forecasts on pasts of which the answer is known."""

import math

import numpy as np
import pytest

from malletrain.core.forecast import Claim, fair_share, forecast, least_floor
from malletrain.core.node_history import SPAN_S, NodeHistory, NodeSpan

LINEAR = np.arange(9.0)
"""Samples/s on 0 to 8 nodes."""
EVEN = np.full(100, 4.0)
DAY = np.tile(np.repeat([8.0, 0.0], 6), 20)
"""Half an hour with nodes, half an hour without."""


def test_on_a_machine_that_never_changes_the_end_is_work_over_speed():
    seen = forecast(4000.0, LINEAR, EVEN, 4.0, Claim(), now=100.0)
    assert seen.end == pytest.approx(1100.0)
    assert (seen.low, seen.high) == (
        pytest.approx(100 + 1000 / 1.15),
        pytest.approx(100 + 1000 / 0.85),
    )
    assert seen.hours == pytest.approx(100 * SPAN_S / 3600)


@pytest.mark.parametrize(
    ("claim", "nodes"), [(Claim(), 4), (Claim(0.5), 2), (Claim(0.25, 3.0), 3), (Claim(0.1, 9.0), 4)]
)
def test_a_job_gets_its_share_and_not_less_than_its_floor(claim, nodes):
    seen = forecast(1200.0, LINEAR, EVEN, 4.0, claim, now=0.0)
    assert seen.end == pytest.approx(1200.0 / nodes)


def test_half_of_the_time_without_nodes_is_in_the_interval():
    hour = 3600.0
    work = 8.0 * 5 * hour / 2
    seen = forecast(work, LINEAR, DAY, 8.0, Claim(), now=0.0)
    assert 4.0 * hour < seen.end < 6.0 * hour
    assert seen.low < seen.end < seen.high


def test_the_past_comes_again_and_again():
    seen = forecast(4.0 * 250 * SPAN_S, LINEAR, EVEN, 4.0, Claim(), now=0.0)
    assert seen.end == pytest.approx(250 * SPAN_S)


def test_on_no_nodes_it_never_ends():
    seen = forecast(1.0, LINEAR, np.zeros(50), 0.0, Claim(), now=0.0)
    assert math.isinf(seen.end)
    assert math.isinf(seen.low)


def test_turns_are_taken_only_while_there_are_as_many_nodes_as_the_job_needs():
    """On a machine that never has four nodes at once a job of four does not run half of the time,
    but never.
    """
    claim = Claim(0.25, least=4)
    assert math.isinf(forecast(1.0, LINEAR, np.full(50, 3.0), 3.0, claim, now=0.0).low)
    seen = forecast(1200.0, LINEAR, EVEN, 4.0, claim, now=0.0)
    assert seen.end == pytest.approx(1200.0), "four nodes for a quarter of the time"
    half = forecast(
        8.0 * 20 * SPAN_S, LINEAR, np.tile([8.0, 3.0], 50), 8.0, Claim(least=4), now=0.0
    )
    assert half.end == pytest.approx(40 * SPAN_S, rel=0.05)


@pytest.mark.parametrize(
    ("within_s", "nodes"), [(1001.0, 4), (2001.0, 2), (3999.0, 2), (4001.0, 1), (10.0, 8)]
)
def test_the_fewest_nodes_that_are_in_time(within_s, nodes):
    sizes = [1, 2, 4, 8]
    assert least_floor(4000.0, within_s, LINEAR, np.full(50, 8.0), 8.0, sizes) == nodes


@pytest.mark.parametrize(
    ("most", "nodes", "share"),
    [([4, 4], 8.0, 0.5), ([1, 1, 64], 8.0, 0.75), ([1, 2], 8.0, 1.0), ([64] * 4, 8.0, 0.25)],
)
def test_what_small_jobs_cannot_use_is_left_to_the_others(most, nodes, share):
    assert fair_share(most, nodes) == pytest.approx(share)


def test_moments_like_this_one_count():
    """After a span with many nodes comes one with none, and the reverse."""
    past = np.tile([8.0, 0.0], 300)
    work = 8.0 * SPAN_S / 2
    rich = forecast(work, LINEAR, past, 8.0, Claim(), now=0.0)
    poor = forecast(work, LINEAR, past, 0.0, Claim(), now=0.0)
    assert rich.end == pytest.approx(SPAN_S / 2)
    assert poor.end == pytest.approx(1.5 * SPAN_S)


def test_history_keeps_the_mean_of_each_span_and_class():
    history = NodeHistory()
    history.feed({"a": 10}, 1000.0)
    history.feed({"a": 20, "b": 3}, 1000.0 + SPAN_S / 2)
    history.feed({}, 1000.0 + 2 * SPAN_S)
    assert history.nodes("a").tolist() == [15.0, 20.0]
    assert history.nodes("b").tolist() == [1.5, 3.0]
    assert history.now("a") == 0.0
    assert history.usual_class() == "a"
    fresh = history.fresh()
    assert history.fresh() == []
    again = NodeHistory()
    again.restore(fresh)
    assert again.nodes("a").tolist() == [15.0, 20.0]
    assert NodeSpan(1000.0, "b", 1.5) in fresh
