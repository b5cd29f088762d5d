"""The advisor in a simulated cluster: profiles from the request to the curve, with losses of nodes,
crashes and jobs that end.
"""

import pytest

from jpa import (
    Advisor,
    AdvisorConfig,
    AdvisorTick,
    Donor,
    MeasureConfig,
    MeasuredCurve,
    NodesChanged,
    PlanConfig,
    PointMeasured,
    ProfileFinished,
    ProfileRequested,
    ProfileResult,
    ProfileWaiting,
    ProgressReported,
    ScaleReached,
    ScriptCrashed,
    SetSize,
)
from tests.jpa.models import Job, fixed_global_batch, linear
from tests.jpa.world import Member, World

LAW = fixed_global_batch(0.05)
ALL_SIZES = AdvisorConfig(plan=PlanConfig(skip_interpolated=False))


def member(law=LAW, low=1, high=6, nodes=0, seed=0, **more):
    return Member(Job(law, seed=seed), low, high, nodes, **more)


def test_an_orderly_profile_is_one_scale_up_and_a_staircase_down():
    world = World(6, {"a": member()}, ALL_SIZES)
    world.want("a")
    world.run()
    done = world.finished("a")
    assert world.staircase == [6, 5, 4, 3, 2, 1]
    assert (done.result, done.scale_ups, done.scale_downs) == (ProfileResult.MEASURED, 1, 5)
    assert done.visited == (6, 5, 4, 3, 2, 1)
    for k in range(1, 7):
        assert done.curve.estimate(k)[0] == pytest.approx(LAW(k), rel=0.05)
    assert len(world.of(PointMeasured)) == 6
    assert world.advisor.profiling is None
    assert world.advisor.target is None


def test_a_running_job_is_scaled_up_from_where_it_is():
    world = World(4, {"a": member(nodes=2)}, ALL_SIZES)
    world.want("a")
    world.run()
    assert world.finished("a").scale_ups == 1
    first = world.of(SetSize)[0]
    assert (first.nodes, first.from_free, first.donor) == (6, 4, None)


def test_a_job_already_at_its_largest_size_is_never_scaled_up():
    world = World(0, {"a": member(nodes=6)}, ALL_SIZES)
    world.want("a")
    world.run()
    done = world.finished("a")
    assert (done.result, done.scale_ups) == (ProfileResult.MEASURED, 0)


def test_free_nodes_come_first_and_then_one_donor():
    donors = {
        "b": member(high=9, nodes=4, interrupted=-500.0),
        "c": member(high=9, nodes=4, interrupted=-900.0),
    }
    world = World(3, {"a": member(), **donors}, ALL_SIZES)
    world.want("a")
    world.run()
    ups = [a for a in world.of(SetSize) if a.donor is not None]
    assert [(a.nodes, a.from_free, a.donor, a.take) for a in ups] == [(6, 3, "c", 3)]
    assert world.members["b"].nodes == 4
    assert world.members["c"].nodes == 1
    assert "left alone for longest" in ups[0].reason


def test_a_donor_just_interrupted_is_left_alone():
    donors = {"b": member(high=9, nodes=9, interrupted=-10.0)}
    world = World(3, {"a": member(), **donors}, ALL_SIZES)
    world.want("a")
    world.run()
    assert all(a.donor is None for a in world.of(SetSize))
    assert world.staircase[0] == 3
    done = world.finished("a")
    assert done.result is ProfileResult.PARTIAL
    assert "were not available" in done.reason


def test_two_jobs_wanting_at_once_are_served_one_after_the_other():
    world = World(6, {"a": member(seed=1), "b": member(seed=2)}, ALL_SIZES)
    world.want("a")
    world.want("b")
    world.want("b")  # asked twice, queued once
    assert world.advisor.profiling == "a"
    assert world.advisor.waiting == ("b",)
    assert "Job a is being profiled" in world.reasons("b")
    world.run()
    ends = [a for a in world.answers if isinstance(a, ProfileFinished)]
    assert [e.job for e in ends] == ["a", "b"]
    assert all(e.scale_ups == 1 for e in ends)
    starts = [t for t, a in world.times if isinstance(a, SetSize) and a.job == "b"]
    assert min(starts) >= max(
        t for t, a in world.times if isinstance(a, ProfileFinished) and a.job == "a"
    )


def test_too_few_nodes_and_the_job_waits_and_says_why():
    world = World(1, {"a": member(low=3)}, ALL_SIZES)
    world.want("a")
    world.run(100)
    assert world.of(SetSize) == []
    assert "needs 3 nodes more" in world.reasons("a")
    assert len(world.of(ProfileWaiting)) == 1  # once a reason, not once a second
    world.free = 6
    world.tell(world.view())
    world.run()
    assert world.finished("a").result is ProfileResult.MEASURED


def test_a_job_that_cannot_be_served_does_not_hold_up_the_next():
    world = World(3, {"a": member(low=5), "b": member(high=3)}, ALL_SIZES)
    world.want("a")
    world.want("b")
    assert world.advisor.profiling == "b"
    assert world.advisor.waiting == ("a",)


def test_a_job_that_waits_costs_no_look_at_each_of_its_sizes(monkeypatch):
    """It is tried anew at every event."""
    checked_sizes = []

    def is_known(curve, size, tolerance):
        checked_sizes.append(size)
        return size < 3

    monkeypatch.setattr("jpa.advisor.is_known", is_known)
    world = World(1, {"a": member(low=2, high=64)}, ALL_SIZES)
    world.want("a")
    assert world.advisor.waiting == ("a",)
    assert checked_sizes == [2, 3], "as far as the smallest that is not known"


def test_less_than_half_of_the_nodes_is_worth_some_patience_but_not_for_ever():
    world = World(2, {"a": member(high=8)}, ALL_SIZES)
    world.want("a")
    world.run(59)
    assert world.of(SetSize) == []
    assert "waits for 4" in world.reasons("a")
    world.run()
    assert world.staircase == [2, 1]
    assert world.finished("a").result is ProfileResult.PARTIAL


def test_nothing_unknown_nothing_measured():
    world = World(6, {"a": member()}, ALL_SIZES)
    curve = MeasuredCurve()
    for k in range(1, 7):
        curve = curve.with_measurement(k, LAW(k), 0.01, 0.0)
    world.want("a", curve=curve)
    assert world.finished("a").result is ProfileResult.MEASURED
    assert world.of(SetSize) == []


# --- disturbances ---


def test_preemption_in_the_middle_keeps_what_is_there_and_goes_on_with_the_nodes_left():
    world = World(6, {"a": member()}, ALL_SIZES)
    world.want("a")
    world.run(until=lambda: len(world.of(PointMeasured)) == 1 and world.staircase[-1] == 5)
    world.run(3)
    world.preempt("a", 2)
    world.run()
    assert world.staircase == [6, 5, 3, 2, 1]
    done = world.finished("a")
    assert done.scale_ups == 1
    assert done.curve.estimate(6)[0] == pytest.approx(LAW(6), rel=0.05)
    assert done.curve.estimate(3)[0] == pytest.approx(LAW(3), rel=0.05)


def test_preemption_below_the_minimum_sends_the_job_back_to_the_queue_with_what_it_has():
    world = World(6, {"a": member(low=3)}, ALL_SIZES)
    world.want("a")
    world.run(until=lambda: len(world.of(PointMeasured)) == 2)
    world.free = 0  # others took what the profile released
    world.preempt("a", 2)
    assert world.advisor.profiling is None
    assert world.advisor.waiting == ("a",)
    assert "lost nodes" in world.reasons("a")
    world.free = 6
    world.tell(world.view())
    world.run()
    done = world.finished("a")
    assert done.result is ProfileResult.MEASURED
    assert done.visited == (6, 5, 4, 3)  # nothing is measured twice
    assert done.scale_ups == 2


def test_a_job_that_loses_its_nodes_again_and_again_is_not_profiled_for_ever():
    world = World(6, {"a": member(low=3)}, ALL_SIZES)
    world.want("a")
    for _ in range(10):
        world.run(until=lambda: world.advisor.profiling == "a" or not world.advisor.waiting)
        if world.advisor.profiling is None:
            break
        world.run(20, until=lambda: world.advisor.profiling is None)
        if world.advisor.profiling is None:
            break
        world.preempt("a", 4)
        world.free = 6
        world.tell(world.view())
    assert world.finished("a").result in (ProfileResult.PARTIAL, ProfileResult.UNKNOWN)


def test_a_job_without_progress_ends_as_unknown_within_bounded_time():
    world = World(6, {"a": member(reports=False)}, ALL_SIZES)
    world.want("a")
    world.run()
    done = world.finished("a")
    assert done.result is ProfileResult.UNKNOWN
    assert not done.curve.has_data
    assert "neutral prior" in done.reason
    assert world.now <= 2 * (60 + 18) + 5


def test_a_throughput_of_zero_at_some_size_is_measured_as_such():
    world = World(4, {"a": member(lambda k: 0.0 if k in (4, 2) else linear(k), high=4)}, ALL_SIZES)
    world.want("a")
    world.run()
    done = world.finished("a")
    assert done.visited == (4, 3, 2, 1)
    assert done.curve.estimate(4) == (0.0, 0.0)
    assert done.curve.estimate(2) == (0.0, 0.0)
    assert done.curve.estimate(3)[0] == pytest.approx(300, rel=0.05)


def test_a_size_at_which_the_script_crashes_is_unusable_and_the_others_are_measured():
    world = World(5, {"a": member(high=5, crashes=frozenset({5, 3}))}, ALL_SIZES)
    world.want("a")
    world.run()
    done = world.finished("a")
    assert world.staircase == [5, 4, 3, 2, 1]
    assert done.result is ProfileResult.MEASURED
    assert done.curve.unusable == {5, 3}
    assert done.curve.estimate(3) == (0.0, 0.0)
    assert done.curve.measured_sizes == (1, 2, 4)
    assert "5, 3" in done.reason


def test_a_script_that_crashes_everywhere_is_the_scripts_fault_and_no_size_is_blamed():
    world = World(6, {"a": member(crashes=frozenset(range(1, 7)))}, ALL_SIZES)
    world.want("a")
    world.run()
    done = world.finished("a")
    assert done.result is ProfileResult.UNKNOWN
    assert world.staircase == [6, 5, 4]
    assert done.curve.unusable == frozenset()
    assert "6, 5, 4" in done.reason


def test_a_job_that_finishes_while_it_is_profiled_leaves_its_curve_and_frees_the_place():
    world = World(6, {"a": member(), "b": member()}, ALL_SIZES)
    world.want("a")
    world.want("b")
    world.run(until=lambda: len(world.of(PointMeasured)) == 2)
    world.end("a")
    assert world.finished("a").result is ProfileResult.GONE
    assert world.finished("a").curve.measured_sizes == (5, 6)
    assert world.advisor.profiling == "b"


def test_a_waiting_job_that_ends_is_forgotten():
    world = World(6, {"a": member(), "b": member()}, ALL_SIZES)
    world.want("a")
    world.want("b")
    world.end("b")
    assert world.advisor.waiting == ()


def test_a_rescale_that_never_ends_is_given_up():
    advisor = Advisor(AdvisorConfig(rescale_timeout_s=30, max_crashes=2))
    advisor.handle(NodesChanged({"default": 4}), 0.0)
    advisor.handle(ProfileRequested("a", 1, 4), 0.0)
    answers = [a for t in range(1, 100) for a in advisor.handle(AdvisorTick(), float(t))]
    assert [a.nodes for a in answers if isinstance(a, SetSize)] == [3]
    (done,) = [a for a in answers if isinstance(a, ProfileFinished)]
    assert done.result is ProfileResult.UNKNOWN
    assert done.seconds == 60
    assert advisor.profiling is None


def test_the_time_for_a_profile_is_bounded():
    config = AdvisorConfig(plan=PlanConfig(skip_interpolated=False), max_profile_s=100.0)
    world = World(6, {"a": member()}, config)
    world.want("a")
    world.run()
    done = world.finished("a")
    assert done.result is ProfileResult.PARTIAL
    assert "100 s" in done.reason
    assert done.seconds <= 101
    assert 6 in done.curve.measured_sizes


def test_a_new_phase_in_the_middle_is_measured_as_another_curve():
    advisor = Advisor(AdvisorConfig(measure=MeasureConfig(min_seconds=2, warmup_s=0.1)))
    advisor.handle(NodesChanged({"default": 2}), 0.0)
    advisor.handle(ProfileRequested("a", 1, 2), 0.0)
    advisor.handle(ScaleReached("a", 2), 1.0)
    for i in range(5):
        advisor.handle(ProgressReported("a", 1 + i * 0.1, i * 10.0, "batch=1"), 1 + i * 0.1)
    measured, time = [], 2.0
    while not measured and time < 60:
        measured = [
            a
            for a in advisor.handle(ProgressReported("a", time, time * 50, "batch=2"), time)
            if isinstance(a, PointMeasured)
        ]
        time += 0.1
    assert measured[0].curve.phase == "batch=2"
    assert measured[0].measurement.rate == pytest.approx(50)


@pytest.mark.parametrize(
    "request_event",
    [
        ProfileRequested("a", 0, 4),
        ProfileRequested("a", 5, 4),
        ProfileRequested("a", 3, 4, sizes=(1, 2)),
        ProfileRequested("a", 1, 4, requested_sizes=(9,)),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_and_nothing_is_queued(request_event):
    advisor = Advisor()
    with pytest.raises(ValueError, match=r"nodes"):
        advisor.handle(request_event, 0.0)
    assert advisor.waiting == ()


def test_events_about_other_jobs_and_old_rescales_change_nothing():
    advisor = Advisor()
    advisor.handle(NodesChanged({"default": 4}), 0.0)
    advisor.handle(ProfileRequested("a", 1, 4), 0.0)
    for event in (
        ScaleReached("a", 2),
        ScaleReached("b", 4),
        ScriptCrashed("b", 4),
        ProgressReported("b", 1.0, 5.0),
        ProgressReported("a", 1.0, 5.0),
    ):
        assert advisor.handle(event, 1.0) == []
    assert advisor.target == 4


def test_nodes_of_another_class_do_not_count():
    advisor = Advisor()
    advisor.handle(NodesChanged({"cpu": 9}, (Donor("b", 9, pool="cpu"),)), 0.0)
    assert isinstance(
        advisor.handle(ProfileRequested("a", 1, 4, pool="gpu"), 0.0)[0], ProfileWaiting
    )
    answers = advisor.handle(NodesChanged({"cpu": 0, "gpu": 4}), 1.0)
    assert [a.nodes for a in answers] == [4]


# --- whatever happens ---


def test_sizes_the_user_chose_are_measured_although_the_curve_gives_them():
    curve = MeasuredCurve()
    for k in (1, 2, 3, 5):
        curve = curve.with_measurement(k, 100.0 * k, 0.1 * k, 0.0)
    advisor = Advisor()
    advisor.handle(NodesChanged({"default": 5}), 0.0)
    (answer,) = advisor.handle(
        ProfileRequested("a", 1, 5, requested_sizes=(4, 2), curve=curve), 0.0
    )
    assert isinstance(answer, SetSize)
    assert answer.nodes == 4
