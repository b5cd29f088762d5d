"""The expected value and the cost of a profile."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from jpa import MeasuredCurve, Prior
from jpa.information_value import ProfileContext, information_value, profile_cost, profile_pays

SIZES = (1, 2, 4, 8, 16, 32)
AROUND = ProfileContext(4, 50.0, 7200.0, 18.0, 12.0, 10.0, 6)


def straight(shape_std: float, rate: float = 100.0) -> MeasuredCurve:
    """Measured at four nodes; believed to be straight elsewhere, that much sure."""
    prior = Prior(tuple((k, rate * k) for k in SIZES), 0.3, shape_std, "a sibling")
    return MeasuredCurve.from_prior(prior).with_measurement(4, 4 * rate, 0.01 * 4 * rate, 0.0)


def bent(shape_std: float) -> MeasuredCurve:
    """Measured at four nodes; believed to go with nodes^0.8 elsewhere, that much sure."""
    prior = Prior(tuple((k, 100.0 * k**0.8) for k in SIZES), 0.3, shape_std, "a sibling")
    four = 100.0 * 4**0.8
    return MeasuredCurve.from_prior(prior).with_measurement(4, four, 0.01 * four, 0.0)


def test_a_shape_that_is_known_tells_nothing():
    everywhere = MeasuredCurve()
    for k in SIZES:
        everywhere = everywhere.with_measurement(k, 100.0 * k, 0.1 * k, 0.0)
    assert information_value(everywhere, SIZES, 4, 50.0) == pytest.approx(0.0, abs=1.0)
    assert not profile_pays(everywhere, SIZES, AROUND)


def test_where_no_shape_would_change_the_size_it_is_worth_nothing():
    """At a price of nothing the largest size is the best, by the line and by all near it."""
    assert information_value(straight(0.02), SIZES, 4, 0.0) == pytest.approx(0.0, abs=1e-6)


def test_the_less_is_known_and_the_closer_the_choice_the_more_it_is_worth():
    close = [information_value(bent(s), SIZES, 4, 50.0) for s in (0.02, 0.05, 0.1, 0.2)]
    assert close == sorted(close)
    assert close[0] < close[-1]
    assert information_value(bent(0.1), SIZES, 4, 50.0) > information_value(
        bent(0.1), SIZES, 4, 20.0
    )


def test_what_is_unknown_is_worth_more_than_what_a_sibling_tells():
    alone = MeasuredCurve().with_measurement(4, 400.0, 4.0, 0.0)
    assert information_value(alone, SIZES, 4, 40.0) > information_value(bent(0.02), SIZES, 4, 40.0)


def test_what_cannot_be_is_worth_nothing():
    """Where a node brings elsewhere what the job makes of its first, it cannot be worth more."""
    alone = MeasuredCurve().with_measurement(1, 100.0, 1.0, 0.0)
    assert alone.estimate(64)[1] > alone.estimate(64)[0], "the law excludes nothing"
    assert information_value(alone, (1, 2, 4, 16, 64), 1, 100.0) == 0.0
    assert information_value(alone, (1, 2, 4, 16, 64), 1, 60.0) > 0.0


def test_where_the_law_has_turned_out_right_there_is_less_to_know():
    unsure = [
        information_value(bent(0.2), SIZES, 4, 50.0, std_factor)
        for std_factor in (0.0, 0.1, 0.5, 1.0)
    ]
    assert unsure == sorted(unsure)
    assert unsure[0] == 0.0
    assert unsure[-1] > 0.0
    assert profile_pays(bent(0.2), SIZES, AROUND)
    assert not profile_pays(bent(0.2), SIZES, replace(AROUND, std_factor=0.0))


def test_a_profile_costs_its_pauses_at_least():
    curve = straight(0.05)
    assert profile_cost(curve, SIZES, AROUND) >= 400.0 * (18.0 + 5 * 12.0)
    dearer = replace(AROUND, up_s=60.0)
    assert profile_cost(curve, SIZES, dearer) == pytest.approx(
        profile_cost(curve, SIZES, AROUND) + 42 * 400.0
    )


def test_who_gives_up_nodes_for_it_stands_still_twice():
    curve = straight(0.05)
    beside = replace(AROUND, donor_rate=1000.0)
    assert profile_cost(curve, SIZES, beside) == pytest.approx(
        profile_cost(curve, SIZES, AROUND) + 1000.0 * (18.0 + 12.0)
    )


def test_it_pays_for_long_jobs_and_not_for_short_ones():
    curve = MeasuredCurve().with_measurement(4, 400.0, 4.0, 0.0)
    close = replace(AROUND, node_price=90.0)
    assert profile_pays(curve, SIZES, replace(close, use_s=24 * 3600.0))
    assert not profile_pays(curve, SIZES, replace(close, use_s=60.0))


def test_a_job_that_processes_nothing_is_not_worth_a_profile():
    nothing = MeasuredCurve().with_measurement(4, 0.0, 0.0, 0.0)
    assert information_value(nothing, SIZES, 4, 1.0) == 0.0
    assert math.isfinite(profile_cost(nothing, SIZES, AROUND))
