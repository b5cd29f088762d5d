"""Profiles as the controller carries them out: size after size, donors, losses, and everything that
can go wrong with a job.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from allocator import ScalingCurve
from malletrain.core.controller import Controller
from malletrain.core.events import (
    JobCancelled,
    JobCompleted,
    JobState,
    JobSubmitted,
    LayoutFound,
    NodeLeaving,
    Progressed,
    RescaleCostMeasured,
    RoundInterrupted,
)
from malletrain.core.scaling_model import ScalingModel
from malletrain.core.settings import ControllerSettings
from tests.malletrain.core.profiled_world import (
    ProfiledWorld,
    amdahl,
    profiled_job,
    settings,
    world,
)


def test_one_job_alone_walks_down_every_size_and_then_gets_all_nodes_back():
    w = world(6, profiled_job())
    w.until_profiled("a")
    assert w.sizes["a"] == [6, 5, 4, 3, 2, 1, 6], "down every size, and back up in one step"
    end = w.of("profile-finished", "a")[0]
    assert end.data["result"] == "measured"
    assert (end.data["scale_ups"], end.data["scale_downs"]) == (1, 5)
    record = w.controller.jobs["a"]
    assert record.state is JobState.RUNNING
    for k in range(1, 7):
        assert record.scaling.curve.estimate(k)[0] == pytest.approx(amdahl(k), rel=0.02)
        assert record.curve.at(k) <= amdahl(k) * 1.001
    assert [a.data["nodes"] for a in w.of("profile-point")] == [6, 5, 4, 3, 2, 1]
    assert w.scaling_models["a"].profiled


def test_without_profiling_nothing_of_it_happens():
    w = world(3, profiled_job())
    off = Controller(replace(w.settings, profiling=None))
    off.handle(profiled_job(high=3), 0.0)
    assert off.handle(Progressed("a", 1, 1.0, 5.0), 1.0) == []
    assert off.handle(RescaleCostMeasured("a", "up", 3.0), 1.0) == []
    assert off.jobs["a"].cost is None


@pytest.mark.parametrize(
    "job",
    [
        JobSubmitted("a", 1, 6),
        profiled_job(low=3, high=3),
        profiled_job(curve=ScalingCurve.of({1: 10.0, 6: 50.0})),
        profiled_job(sizes=(4,)),
        profiled_job(scaling=ScalingModel(profiled=True, result="measured")),
    ],
)
def test_who_is_not_profiled(job):
    w = world(6, job)
    w.run(60)
    assert not w.announcements
    assert len(w.sizes["a"]) == 1


def test_the_sizes_of_the_user_are_the_ones_visited():
    w = world(6, profiled_job(profile_sizes=(5, 2)))
    w.until_profiled("a")
    assert w.sizes["a"][:2] == [5, 2]
    assert w.controller.jobs["a"].scaling.curve.measured_sizes == (2, 5)


def test_a_donor_gives_nodes_and_is_told_of_it():
    w = world(6, JobSubmitted("b", 1, 6))
    w.run(20)
    assert w.sizes["b"] == [6]
    w.do(profiled_job())
    w.until_profiled("a")
    first = w.of("profile-started", "a")[0]
    assert first.data["donor"] == "b"
    assert first.data["nodes"] == 5, "the donor keeps its last node"
    (donation,) = w.of("nodes-donated")
    assert (donation.job, donation.data["by"]) == ("b", "a")
    assert (donation.data["before"], donation.data["nodes"]) == (6, 1)
    assert w.controller.jobs["b"].interrupted_at is not None
    steps = w.sizes["a"][:5]
    assert steps == [5, 4, 3, 2, 1]


def test_one_profile_at_a_time_and_the_second_says_why_it_waits():
    w = world(6, profiled_job("a", 1, 3), profiled_job("b", 1, 3))
    w.until_profiled("b")
    began = [a.job for a in w.announcements if a.kind == "profile-started"]
    assert began == ["a", "b"]
    assert any("one profile runs at a time" in a.sentence for a in w.of("profile-waiting", "b"))
    turns = [
        (a.job, a.kind)
        for a in w.announcements
        if a.kind in ("profile-started", "profile-finished")
    ]
    assert turns[1:3] == [("a", "profile-finished"), ("b", "profile-started")]
    assert w.sizes["b"], "it ran meanwhile"


def test_too_few_nodes_the_job_runs_unprofiled_and_says_why():
    w = world(6, JobSubmitted("b", 5, 5), profiled_job("a", 1, 6))
    w.run(15)
    assert w.controller.jobs["a"].state is JobState.RUNNING
    assert any("available" in a.sentence for a in w.of("profile-waiting", "a"))


def test_nodes_taken_during_the_profile_do_not_end_it():
    w = world(6, profiled_job())
    w.run(100, until=lambda: len(w.of("profile-point")) == 1)
    w.take("n3", "n4", "n5")
    w.until_profiled("a")
    assert w.sizes["a"] == [6, 5, 3, 2, 1, 3]
    assert w.of("profile-finished")[0].data["scale_ups"] == 1
    assert {1, 2, 3, 6} <= set(w.controller.jobs["a"].scaling.curve.measured_sizes)


def test_a_node_that_says_it_leaves_is_let_go_in_time():
    w = world(6, profiled_job())
    w.run(100, until=lambda: len(w.of("profile-point")) == 1)
    node = w.controller.jobs["a"].nodes[0]
    w.leaving[node] = w.now + 10
    w.do(NodeLeaving(node, 10.0))
    w.run(9)
    assert node not in w.controller.jobs["a"].nodes
    w.lose(node)
    w.until_profiled("a")
    assert w.result("a") == "measured"


def test_preempted_below_its_minimum_it_waits_and_goes_on_later():
    w = world(6, profiled_job(low=2))
    w.run(100, until=lambda: len(w.of("profile-point")) == 2)
    w.take("n1", "n2", "n3", "n4", "n5")
    w.run(5)
    assert w.controller.jobs["a"].state is JobState.SUSPENDED
    assert any("lost nodes" in a.sentence for a in w.of("profile-waiting"))
    w.join("n1", "n2", "n3", "n4", "n5")
    w.until_profiled("a")
    assert w.result("a") == "measured"
    assert w.sizes["a"] == [6, 5, 4, 4, 3, 2, 6], "what was measured is not measured again"


def test_a_job_that_never_reports_runs_with_the_neutral_prior():
    w = ProfiledWorld(4, settings(silence_s=5.0))
    w.silent["a"] = {1, 2, 3, 4}
    w.do(profiled_job(high=4))
    w.join()
    w.until_profiled("a")
    assert w.result("a") == "unknown"
    assert "no progress" in w.of("profile-finished")[0].sentence.lower()
    assert w.controller.jobs["a"].curve is None
    w.run(20)
    assert len(w.controller.jobs["a"].nodes) == 4
    assert len(w.of("profile-started")) == 1


def test_no_progress_at_one_size_makes_it_worth_nothing():
    w = ProfiledWorld(4, settings(silence_s=5.0))
    w.silent["a"] = {3}
    w.do(profiled_job(high=4))
    w.join()
    w.until_profiled("a")
    assert w.controller.jobs["a"].curve.at(3) == 0.0
    w.run(20)
    assert len(w.controller.jobs["a"].nodes) == 4


def test_throughput_zero_at_one_size_ends_its_measurement():
    w = ProfiledWorld(3)
    w.rates["a"] = lambda k: 0.0 if k == 2 else amdahl(k)
    w.do(profiled_job(high=3))
    w.join()
    w.until_profiled("a")
    assert w.sizes["a"][:3] == [3, 2, 1]
    assert w.controller.jobs["a"].curve.at(2) == 0.0


def test_a_size_at_which_the_script_crashes_is_not_used_and_costs_no_try():
    w = ProfiledWorld(4)
    w.crashes["a"] = {3}
    w.do(profiled_job(high=4))
    w.join()
    w.until_profiled("a")
    record = w.controller.jobs["a"]
    assert w.sizes["a"][:4] == [4, 3, 2, 1]
    assert record.scaling.curve.unusable == {3}
    assert record.tries == 0
    assert not record.accepts(3)
    w.run(30)
    assert record.state is JobState.RUNNING
    assert len(record.nodes) == 4
    w.take(record.nodes[0])
    w.run(10)
    assert len(record.nodes) == 2, "three nodes are left, but it cannot use three"


def test_a_script_that_crashes_at_every_size_fails_after_its_tries():
    w = ProfiledWorld(4)
    w.crashes["a"] = {1, 2, 3, 4}
    w.do(profiled_job(high=4))
    w.join()
    w.run(60)
    record = w.controller.jobs["a"]
    assert record.state is JobState.FAILED
    assert w.breaks["a"] == 3
    assert w.advisor.profiling is None


@pytest.mark.parametrize("news", [JobCompleted("a"), JobCancelled("a")])
def test_a_job_that_ends_while_it_is_profiled_leaves_its_curve(news):
    w = world(4, profiled_job(high=4))
    w.run(100, until=lambda: len(w.of("profile-point")) == 2)
    w.do(news)
    assert w.result("a") == "gone"
    assert set(w.scaling_models["a"].curve.measured_sizes) == {4, 3}
    assert w.advisor.profiling is None
    w.do(profiled_job("b", 1, 2))
    w.until_profiled("b")


def test_workers_that_are_to_be_started_again_are_so_at_the_same_size():
    w = world(3, profiled_job(high=3))
    w.run(
        100, until=lambda: len(w.of("profile-point")) == 1 and not w.controller.jobs["a"].rescaling
    )
    before = len(w.sizes["a"])
    w.epoch["a"] += 1
    w.do(RoundInterrupted("a"))
    w.run(1)
    assert w.sizes["a"][before:] == [2]
    w.until_profiled("a")
    assert w.result("a") == "measured"


def test_a_job_alone_on_fewer_nodes_is_profiled_on_those_and_again_when_there_are_more():
    w = ProfiledWorld(6, settings(again_s=100.0))
    w.do(profiled_job())
    w.join("n0", "n1", "n2")
    w.until_profiled("a")
    assert w.result("a") == "partial"
    assert w.sizes["a"][:3] == [3, 2, 1]
    w.run(50)
    w.join("n3", "n4")
    w.run(200)
    assert len(w.of("profile-finished")) == 1
    w.join("n5")
    w.run(300)
    assert len(w.of("profile-finished")) == 2
    assert w.result("a") == "measured"


def test_a_restart_goes_on_with_what_was_measured():
    w = world(4, profiled_job(high=4))
    w.run(100, until=lambda: len(w.of("profile-point")) == 2)
    learned = w.scaling_models["a"]
    again = Controller(w.settings)
    again.handle(
        profiled_job(
            high=4,
            state=JobState.PROFILING,
            scaling=ScalingModel.from_dict(learned.to_dict(), learned.costs),
        ),
        0.0,
    )
    assert again.jobs["a"].state is JobState.RUNNING
    assert set(again.jobs["a"].scaling.curve.measured_sizes) == {4, 3}
    assert again.jobs["a"].curve.at(4) == pytest.approx(amdahl(4), rel=0.1)


def test_a_starving_job_is_served_before_a_profile_begins():
    config = settings()
    w = ProfiledWorld(4, replace(config, starvation_s=30.0))
    w.do(JobSubmitted("big", 4, 4))
    w.join()
    w.run(5)
    w.do(profiled_job("a", 1, 4))
    w.run(100)
    turns = w.controller.jobs["a"]
    assert turns.nodes, "it has had its turn"
    w.run(400)
    assert w.result("a") in ("measured", "partial")


def test_the_settings_of_a_controller_are_off_by_default():
    assert ControllerSettings().profiling is None


def test_a_profile_waits_for_the_layout_and_a_change_of_it_is_a_phase():
    w = world(3, profiled_job(high=3, seeks_layout=True))
    w.run(60)
    assert not w.of("profile-started", "a")
    assert w.controller.jobs["a"].nodes
    assert not w.controller.jobs["a"].scaling.curve.current.points
    w.do(LayoutFound("a", "2 processes × 1 thread"))
    w.until_profiled("a")
    curve = w.controller.jobs["a"].scaling.curve
    assert curve.phase == "default, layout 2 processes × 1 thread"
    assert curve.measured_sizes == (1, 2, 3)


def test_a_layout_that_stays_the_default_is_no_phase():
    w = world(3, profiled_job(high=3, seeks_layout=True))
    w.run(10)
    w.do(LayoutFound("a"))
    w.until_profiled("a")
    assert w.controller.jobs["a"].scaling.curve.phase == "default"
