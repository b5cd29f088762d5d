"""Profiles where they have to be worth their cost: a look first, a profile for who goes on long."""

from __future__ import annotations

from dataclasses import replace

from allocator import ScalingCurve
from jpa import MeasuredCurve, Prior
from malletrain.core.events import JobState, JobSubmitted
from malletrain.core.profile_worth import USUAL_S, ProfileWorth
from malletrain.core.records import JobRecord
from malletrain.core.scaling_model import ScalingModel
from malletrain.core.settings import ProfilingSettings
from tests.malletrain.core.profiled_world import wanted, world


def careful(nodes, *jobs):
    return world(nodes, *jobs, when_worth=True)


def test_how_long_a_job_goes_on_is_learned_from_those_that_ended():
    worth = ProfileWorth(ProfilingSettings())
    worth.began("a", 0.0)
    assert 0.5 * USUAL_S < worth.left_s("a", 0.0) < 2 * USUAL_S
    for k in range(40):
        worth.began(f"b{k}", 100.0)
        worth.ended(f"b{k}", 700.0, done=True)
    assert worth.left_s("c", 0.0) < 0.5 * USUAL_S
    worth.ended("never began", 0.0, done=True)


def test_a_job_of_which_nothing_is_known_is_looked_at_on_its_smallest_size():
    w = careful(6, wanted(high=6))
    w.run(200, until=lambda: w.of("profile-finished"))
    assert w.of("profile-finished")[0].data["visited"] == [1]
    assert not w.controller.jobs["a"].scaling.profiled


def test_one_whose_siblings_curve_is_known_begins_where_it_is_best():
    known = Prior(((1, 100.0), (6, 480.0)), 0.35, 0.02, "job before")
    w = careful(6)
    w.do(replace(wanted(high=6), scaling=ScalingModel(MeasuredCurve.from_prior(known))))
    w.run(30)
    assert len(w.controller.jobs["a"].nodes) == 6
    assert not w.of("profile-started"), "no look"


def test_one_that_goes_on_for_hours_is_profiled_then():
    w = careful(6, wanted(high=6))
    w.run(900, until=lambda: len(w.of("profile-finished")) == 2)
    assert 6 in w.of("profile-finished")[1].data["visited"]
    assert w.controller.jobs["a"].scaling.profiled


def test_one_that_is_over_soon_is_not_and_gets_all_nodes_all_the_same():
    w = careful(6, wanted(high=6))
    worth = w.controller.profiles.profiler.worth
    for k in range(300):
        worth.began(f"b{k}", 0.0)
        worth.ended(f"b{k}", 60.0 + k % 3, done=True)
    w.run(60)
    assert len(w.of("profile-started")) == 1, "the look"
    assert w.controller.jobs["a"].scaling.result == "spared"
    assert len(w.controller.jobs["a"].nodes) == 6


def test_a_profile_is_not_made_where_too_much_stands_still_for_it():
    """A job that is as good as over, beside others at one price: one of a node, or one of sixty."""
    made = {}
    for held in (1, 60):
        worth = ProfileWorth(ProfilingSettings())
        for k in range(300):
            worth.began(f"b{k}", 0.0)
            worth.ended(f"b{k}", 900.0 + k % 3, done=True)
        other = JobRecord(JobSubmitted("other", 1, 64), 0, 0, JobState.RUNNING)
        other.curve = ScalingCurve.of({1: 900.0, 64: 64 * 900.0})
        other.nodes = tuple(map(str, range(held)))
        job = JobRecord(JobSubmitted("j", 1, 64), 1, 1, JobState.RUNNING)
        job.nodes = ("x",)
        job.scaling = ScalingModel(MeasuredCurve().with_measurement(1, 1e3, 10.0, 0.0))
        made[held] = worth.pays(job, [job, other], 0.0)
    assert made == {1: True, 60: False}
