"""Forecasts on pasts of which the answer is known, their intervals, and the admitted deadlines."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator import ScalingCurve
from malletrain.core.events import JobCancelled, JobCompleted, RescaleFinished, Tick
from malletrain.core.forecast import (
    INITIAL_FACTORS,
    SIMILAR_MOMENTS,
    SPAN_S,
    Claim,
    DeadlineDemand,
    Ended,
    Forecast,
    Made,
    NodeHistory,
    NodeSpan,
    PastForecasts,
    admit,
    fair_share,
    forecast,
    least_floor,
    node_time,
    nodes_ahead,
    reached,
)
from malletrain.core.goals import GoalsChanged, OwnerGoals, WorkReported
from tests.malletrain.core.controller_script import controller, job, nodes, play

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


# --- corrections by the errors of past forecasts ---

HOUR = 3600.0
EARLY, _, LATE = INITIAL_FACTORS


def model(now, seconds):
    """What a model says that knows its job's speed to 15 %."""
    return Forecast(now + seconds, now + seconds / 1.15, now + seconds / 0.85)


def test_until_ends_were_seen_an_interval_is_taken_to_be_too_narrow():
    forecast = PastForecasts().corrected(model(100.0, 1000.0), 100.0)
    assert forecast.end == 1100.0
    assert forecast.low == pytest.approx(100.0 + EARLY * 1000.0 / 1.15)
    assert forecast.high == pytest.approx(100.0 + LATE * 1000.0 / 0.85)


@pytest.mark.parametrize(
    ("bias", "spread"), [(1.0, 0.1), (1.0, 0.5), (2.0, 0.3), (0.7, 0.2), (1.3, 1.0)]
)
def test_eight_of_ten_ends_lie_inside_whatever_the_model_gets_wrong(bias, spread):
    """Jobs one after another: the intervals of the last 300 hold the end for about 240."""
    rng = np.random.default_rng(7)
    past, now, inside, below = PastForecasts(), 0.0, [], []
    for number in range(400):
        seconds = float(rng.uniform(600.0, 9000.0))
        raw = model(now, seconds)
        end = now + seconds * bias * float(np.exp(rng.normal(0.0, spread)))
        forecast = past.corrected(raw, now)
        past.note(f"j{number}", raw, now)
        past.ended(f"j{number}", end, done=True)
        below.append(end <= forecast.end)
        inside.append(forecast.low <= end <= forecast.high)
        now = end
    assert 0.74 <= np.mean(inside[100:]) <= 0.88
    assert 0.42 <= np.mean(below[100:]) <= 0.58


def test_who_has_not_ended_speaks_too():
    """Every second job takes far longer than forecast. While none of these has ended, the quick
    jobs alone would confirm the forecasts.
    """
    past = PastForecasts()
    for number in range(60):
        past.note(f"quick{number}", model(0.0, HOUR), 0.0)
        past.note(f"slow{number}", model(0.0, HOUR), 0.0)
        past.ended(f"quick{number}", HOUR, done=True)
    now = 8 * HOUR
    forecast = past.corrected(model(now, HOUR), now)
    assert forecast.high - now > 5 * HOUR
    forgetful = PastForecasts()
    for number in range(60):
        forgetful.note(f"quick{number}", model(0.0, HOUR), 0.0)
        forgetful.ended(f"quick{number}", HOUR, done=True)
    assert forgetful.corrected(model(now, HOUR), now).high - now < 2 * HOUR


def test_what_was_cancelled_has_shown_only_how_long_it_took_so_far():
    """Known answer: four jobs, of which the second was cancelled (Kaplan and Meier's estimate)."""
    values, done = np.array([1.0, 2.0, 3.0, 4.0]), np.array([True, False, True, True])
    # After 1: 3/4 are left; after 3: half of these, 3/8; after 4: none.
    parts = [(0.2, 1.0), (0.25, 1.0), (0.26, 3.0), (0.62, 3.0), (0.63, 4.0), (1.0, 4.0)]
    assert [reached(values, done, part) for part, _ in parts] == [at for _, at in parts]


values = st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=1, max_size=40)


@given(values, st.lists(st.floats(0.01, 1.0), min_size=2, max_size=5))
def test_more_of_the_ends_lie_below_a_higher_value(seen, parts):
    at, done = np.array([v for v, _ in seen]), np.array([d for _, d in seen])
    thresholds = [reached(at, done, part) for part in sorted(parts)]
    assert all(one <= other for one, other in pairwise(thresholds))
    if done.all():
        part = max(parts)
        assert np.mean(at <= thresholds[-1]) >= part - 1e-9


def test_only_the_first_forecast_counts_and_one_of_other_work_does_not():
    past = PastForecasts()
    past.note("j", model(0.0, HOUR), 0.0)
    past.note("j", model(10.0, 9 * HOUR), 10.0)
    assert past.of("j").at == 0.0
    past.forget("j")
    assert past.of("j") is None
    past.ended("j", HOUR, done=True)
    assert past.corrected(model(0.0, HOUR), 0.0).high == pytest.approx(LATE * HOUR / 0.85)


def test_a_forecast_that_never_ends_stays_what_it_is():
    never = Forecast(math.inf, 100.0, math.inf)
    past = PastForecasts()
    past.note("j", never, 0.0)
    assert past.of("j") is None
    assert past.corrected(never, 0.0) == never


def test_it_goes_on_from_what_was_known_before():
    over = [Ended(Made(0.0, HOUR / 1.15, HOUR, HOUR / 0.85), 3 * HOUR, True) for _ in range(90)]
    past = PastForecasts()
    past.restore(over, {"j": Made(0.0, 10.0, 15.0, 20.0)})
    assert past.of("j") == Made(0.0, 10.0, 15.0, 20.0)
    # Ninety of them against the ten of the beginning.
    high = past.corrected(model(0.0, HOUR), 0.0).high
    assert high == pytest.approx(HOUR / 0.85 * (3 * 0.85) ** 0.9 * LATE**0.1, rel=1e-6)


def test_the_controller_keeps_them():
    """One job ends as late as it does, another is cancelled, a third becomes another one."""
    ten = ScalingCurve.of({1: 10.0, 4: 40.0})
    c = controller()

    def due(name):
        wants = OwnerGoals(deadline=9 * HOUR, work=8.5 * HOUR)
        return job(name, 1, 1, curve=ten, goals=wants)

    play(c, [*nodes(*"xyz"), *((1.0, due(name)) for name in "abc"), (2.0, Tick())])
    first = c.goals.past.of("a")
    assert first.at == 1.0
    assert first.low <= 1.0 + HOUR < first.high
    play(c, [(3.0, RescaleFinished(n)) for n in "abc"])
    play(c, [(60.0, WorkReported("a", 400.0)), (300.0, Tick())])
    assert c.goals.past.of("a") == first
    same = OwnerGoals(deadline=8 * HOUR, work=8.5 * HOUR + 1)
    play(c, [(400.0, GoalsChanged("a", same)), (410.0, Tick())])
    assert c.goals.past.of("a") == first
    other = OwnerGoals(deadline=9 * HOUR, work=17 * HOUR)
    play(c, [(500.0, GoalsChanged("c", other)), (510.0, Tick())])
    assert c.goals.past.of("c").at >= 500.0
    before = c.goals.past.corrected(model(600.0, HOUR), 600.0)
    play(c, [(2 * HOUR, JobCancelled("b")), (4 * HOUR, JobCompleted("a"))])
    assert c.goals.past.of("a") is c.goals.past.of("b") is None
    now = 4 * HOUR
    after = c.goals.past.corrected(model(now, HOUR), now)
    assert after.high - now > before.high - 600.0


# --- numbers of nodes ---


def test_a_machine_that_repeats_itself_is_foretold_exactly():
    day = np.array([0.0, 4.0, 9.0, 4.0])
    past = np.tile(day, SIMILAR_MOMENTS)  # as many moments like each of the day as are looked at
    assert nodes_ahead(past, 9.0, 4).tolist() == [[4.0] * 3, [0.0] * 3, [4.0] * 3, [9.0] * 3]


def test_what_is_not_known_is_taken_to_stay():
    assert nodes_ahead(np.array([7.0]), 7.0, 2).tolist() == [[7.0] * 3, [7.0] * 3]


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=300), st.floats(0, 1e4))
def test_it_stays_within_what_there_was(nodes, now):
    quantiles = nodes_ahead(np.array(nodes), now, 5)
    assert quantiles.shape == (5, 3)
    assert (np.diff(quantiles, axis=1) >= -1e-9).all()
    assert quantiles.min() >= min(nodes) - 1e-9
    assert quantiles.max() <= max(nodes) + 1e-9


# --- which deadlines are admitted ---

NODES = 4.0
PAST = np.full(50, NODES)


def feasible(chosen):
    """Served by deadline, each is done in time."""
    used = 0.0
    for demand in sorted(chosen, key=lambda d: d.within_s):
        used += demand.node_s
        if used > NODES * demand.within_s * (1 + 1e-9):
            return False
    return True


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 100)), max_size=7))
def test_as_many_are_admitted_as_any_choice_could(pairs):
    demands = [DeadlineDemand(f"j{k}", 100.0 * w, 100.0 * n) for k, (w, n) in enumerate(pairs)]
    admitted = admit(demands, PAST, NODES)
    assert feasible([d for d in demands if d.job in admitted])
    most = max(
        n
        for n in range(len(demands) + 1)
        if any(feasible(chosen) for chosen in combinations(demands, n))
    )
    assert len(admitted) == most


def test_the_earliest_come_first_and_the_one_that_needs_most_is_dropped():
    demands = [
        DeadlineDemand("late", 900.0, 100.0),
        DeadlineDemand("big", 500.0, 1900.0),
        DeadlineDemand("a", 400.0, 400.0),
    ]
    assert admit(demands, PAST, NODES) == {"a": 0, "late": 1}


def test_an_admitted_deadline_is_preferred_to_a_new_one():
    old, new = (
        DeadlineDemand("old", 500.0, 1200.0, admitted=True),
        DeadlineDemand("new", 500.0, 1000.0),
    )
    assert admit([old, new], PAST, NODES) == {"old": 0}


def test_node_time_of_a_changing_machine_is_a_low_estimate():
    past = np.tile([8.0, 0.0], 200)
    (soon, later) = node_time(past, 8.0, [300.0, 3000.0]).tolist()
    assert soon == 8.0 * 300.0
    assert later == 8.0 * 1500.0
    assert node_time(past, 0.0, [300.0]).tolist() == [0.0]
