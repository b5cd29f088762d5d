"""Intervals of forecasts: as wide as those before would have had to be."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator import ScalingCurve
from malletrain.core.events import JobCancelled, JobCompleted, RescaleFinished, Tick
from malletrain.core.forecast import Forecast
from malletrain.core.goals import GoalsChanged, OwnerGoals, WorkReported
from malletrain.core.past_forecasts import INITIAL_FACTORS, Ended, Made, PastForecasts, reached
from tests.malletrain.core.controller_script import controller, job, nodes, play

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
