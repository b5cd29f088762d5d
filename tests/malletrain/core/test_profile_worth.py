"""Profiles where they have to be worth their cost: who is unknown runs at once, who goes on long is
profiled."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from allocator import ScalingCurve
from jpa import MeasuredCurve, Prior
from malletrain.core.events import JobState, JobSubmitted
from malletrain.core.profile_worth import (
    ASSUMED_DURATION_S,
    ProfileContext,
    ProfileWorth,
    information_value,
    profile_cost,
    profile_pays,
)
from malletrain.core.records import JobRecord
from malletrain.core.scaling_model import ScalingModel
from malletrain.core.settings import ProfilingSettings
from tests.malletrain.core.profiled_world import profiled_job, world


def careful(nodes, *jobs):
    return world(nodes, *jobs, when_worth=True)


def test_how_long_a_job_goes_on_is_learned_from_those_that_ended():
    worth = ProfileWorth(ProfilingSettings())
    worth.trains("a", 1, 0.0)
    assert 0.5 * ASSUMED_DURATION_S < worth.remaining_s("a", 0.0) < 2 * ASSUMED_DURATION_S
    for k in range(40):
        worth.trains(f"b{k}", 1, 100.0)
        worth.ended(f"b{k}", 700.0, done=True)
    assert worth.remaining_s("c", 0.0) < 0.5 * ASSUMED_DURATION_S
    worth.ended("never began", 0.0, done=True)


def test_how_long_jobs_stay_at_a_size_is_learned_from_their_moves():
    worth = ProfileWorth(ProfilingSettings())
    assert worth.stay_s == ASSUMED_DURATION_S
    for k in range(99):
        worth.trains("a", 1 + k % 2, 600.0 * k)
        worth.trains("a", 1 + k % 2, 600.0 * k + 7.0)  # the same again: no move
    assert worth.stay_s == pytest.approx((98 * 600.0 + ASSUMED_DURATION_S) / 99)
    assert worth.rounds("a") == 2 * 99


def test_stays_that_were_cut_short_count_as_at_least_so_long():
    worth = ProfileWorth(ProfilingSettings())
    worth.trains("a", 4, 0.0)
    worth.trains("a", 6, 500.0, visit=True)
    for k in range(5):
        worth.trains("a", 5 - k, 510.0 + 10.0 * k, visit=True)
    assert worth.stay_s == ASSUMED_DURATION_S + 500.0, (
        "visits are no stays, and nobody saw how long it stays"
    )
    worth.profiled("a", 1, 560.0)
    worth.trains("a", 6, 860.0)
    assert worth.stay_s == (ASSUMED_DURATION_S + 500.0 + 300.0) / 2
    worth.ended("a", 1860.0, done=True)
    worth.profiled("a", 0, 1900.0)
    worth.trains("a", 6, 2000.0)
    assert worth.stay_s == (ASSUMED_DURATION_S + 500.0 + 300.0 + 1000.0) / 2


def test_a_profile_does_not_make_the_next_one_look_worthless():
    w = careful(12, profiled_job("a", high=12), profiled_job("b", high=12))
    w.rates["b"] = lambda nodes: 100 * nodes / (1 + 0.5 * (nodes - 1))
    w.run(1800, until=lambda: w.of("profile-started"))
    worth = w.controller.profiles.profiler.worth
    before = worth.stay_s
    w.until_profiled(w.of("profile-started")[0].job)
    assert len(w.of("profile-finished")[0].data["visited"]) > 3
    assert worth.stay_s > 0.3 * before, "the neighbour, which gave nodes, was moved"


def test_how_long_jobs_of_a_kind_go_on_is_found_once_for_all_that_are_asked(monkeypatch):
    """Or a plan would take too long for a sweep of a thousand trials."""
    remaining_s, queries = ProfileWorth.remaining_s, []
    monkeypatch.setattr(
        ProfileWorth,
        "remaining_s",
        lambda worth, job, now: queries.append(job) or remaining_s(worth, job, now),
    )
    worth, jobs = ProfileWorth(ProfilingSettings()), []
    for number in range(50):
        spec = JobSubmitted(f"j{number}", 1, 64, kind="sweep")
        job = JobRecord(spec, number, number, JobState.RUNNING)
        job.nodes = (f"n{number}",)
        job.scaling = ScalingModel(MeasuredCurve().with_measurement(1, 1e3, 10.0, 0.0))
        jobs.append(job)
    for job in jobs[:5]:
        worth.pays(job, jobs, 0.0)
    assert sorted(queries) == sorted(job.submitted.job for job in jobs)


def test_how_wrong_the_law_is_is_learned_from_sizes_that_turn_up():
    """One node was measured; two bring what was expected, again and again."""
    worth = ProfileWorth(ProfilingSettings())
    one = MeasuredCurve().with_measurement(1, 1e3, 10.0, 0.0)
    worth.seen(MeasuredCurve(), 2, 1e3)
    worth.seen(one, 1, 2e3)
    assert worth.doubt == 1.0, "neither told anything of a law"
    for _ in range(99):
        worth.seen(one, 64, one.estimate(64)[0])
    assert worth.doubt == pytest.approx(0.1)
    for _ in range(100):
        worth.seen(one, 64, 1e9)
    assert 0.99 < worth.doubt <= 1.01


def test_a_job_of_which_nothing_is_known_runs_at_once_beside_one_that_is_known():
    """The nodes of the known job yield a thousand times what an unknown one is taken to yield."""
    w = careful(6)
    w.do(JobSubmitted("known", 1, 6, curve=ScalingCurve.of({1: 1e5, 6: 6e5})))
    w.run(60)
    assert len(w.controller.jobs["known"].nodes) == 6
    w.do(profiled_job("new", high=6))
    w.run(20)
    assert len(w.controller.jobs["new"].nodes) == 1
    assert not w.of("profile-started"), "its progress tells how fast it is"
    w.run(120)
    assert w.controller.jobs["new"].curve is not None


def test_but_not_on_more_than_an_even_share_of_the_nodes():
    w = careful(6)
    w.do(JobSubmitted("known", 1, 6, curve=ScalingCurve.of({1: 1e5, 6: 6e5})))
    w.run(60)
    w.do(profiled_job("new", low=4, high=6))
    w.run(60)
    assert not w.controller.jobs["new"].nodes


def test_one_that_never_says_anything_is_put_first_three_times_only():
    w = careful(12)
    w.do(JobSubmitted("known", 1, 12, curve=ScalingCurve.of({1: 1e5, 12: 12e5})))
    w.silent["new"] = set(range(1, 13))
    w.run(60)
    w.do(profiled_job("new", high=12))
    for _ in range(3):
        w.run(60)
        assert len(w.controller.jobs["new"].nodes) == 1
        w.take(*w.controller.jobs["new"].nodes)
    w.run(60)
    assert w.controller.jobs["new"].curve is None
    assert not w.controller.jobs["new"].nodes, "it bids as any other of whom nothing is known"


def test_one_whose_siblings_curve_is_known_begins_where_it_is_best():
    prior = Prior(((1, 100.0), (6, 480.0)), 0.35, 0.02, "job before")
    w = careful(6)
    w.do(replace(profiled_job(high=6), scaling=ScalingModel(MeasuredCurve.from_prior(prior))))
    w.run(30)
    assert len(w.controller.jobs["a"].nodes) == 6
    assert not w.of("profile-started"), "no look"


def test_a_job_that_is_alone_is_not_profiled_for_more_nodes_cannot_be_worse():
    w = careful(6, profiled_job(high=6))
    w.run(900)
    assert len(w.controller.jobs["a"].nodes) == 6
    assert w.controller.jobs["a"].scaling.result == "spared"
    assert not w.of("profile-started")


def test_of_two_that_go_on_for_hours_it_is_asked_who_makes_more_of_the_nodes():
    w = careful(12, profiled_job("a", high=12), profiled_job("b", high=12))
    w.rates["b"] = lambda nodes: 100 * nodes / (1 + 0.5 * (nodes - 1))
    w.run(1800, until=lambda: w.of("profile-finished"))
    assert w.of("profile-finished"), w.announcements[-3:]
    assert max(w.of("profile-finished")[0].data["visited"]) > 6


def test_two_that_are_over_soon_are_not_profiled():
    w = careful(12, profiled_job("a", high=12), profiled_job("b", high=12))
    w.rates["b"] = lambda nodes: 100 * nodes / (1 + 0.5 * (nodes - 1))
    worth = w.controller.profiles.profiler.worth
    for k in range(300):
        worth.trains(f"b{k}", 1, 0.0)
        worth.ended(f"b{k}", 60.0 + k % 3, done=True)
    w.run(1800)
    assert not w.of("profile-started")
    assert {job.scaling.result for job in w.controller.jobs.values()} == {"spared"}


def test_a_profile_is_not_made_where_too_much_stands_still_for_it():
    """The job is nearly over; the job beside it, which would stand still, has one node or sixty."""
    pays = {}
    for node_count in (1, 60):
        worth = ProfileWorth(ProfilingSettings())
        for k in range(300):
            worth.trains(f"b{k}", 1, 0.0)
            worth.ended(f"b{k}", 600.0 + k % 3, done=True)
        other = JobRecord(JobSubmitted("other", 1, 64), 0, 0, JobState.RUNNING)
        other.curve = ScalingCurve.of({1: 600.0, 64: 64 * 600.0})
        other.nodes = tuple(map(str, range(node_count)))
        job = JobRecord(JobSubmitted("j", 1, 64), 1, 1, JobState.RUNNING)
        job.nodes = ("x",)
        job.scaling = ScalingModel(MeasuredCurve().with_measurement(1, 1e3, 10.0, 0.0))
        pays[node_count] = worth.pays(job, [job, other], 0.0)
    assert pays == {1: True, 60: False}


def test_of_many_jobs_some_are_looked_at_at_one_moment_and_the_others_later():
    worth, jobs = ProfileWorth(ProfilingSettings()), []
    for number in range(25):
        job = JobRecord(JobSubmitted(f"j{number}", 1, 64), number, number, JobState.RUNNING)
        job.nodes = (f"n{number}",)
        job.scaling = ScalingModel(MeasuredCurve().with_measurement(1, 1e3, 10.0, 0.0))
        job.curve = job.scaling.bid_curve(range(1, 65), 0.0)
        jobs.append(job)
    counts = []
    for moment in (0.0, 1.0, 2.0, 3.0):
        for job in jobs:
            worth.pays(job, jobs, moment)
        counts.append(sum(worth.has_estimate(job.submitted.job) for job in jobs))
    assert counts == [10, 20, 25, 25]


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
