"""The end of jobs, patience and restarts of the daemon, as tables: events in, commands out."""

from __future__ import annotations

import pytest

from allocator import RescaleCost, ScalingCurve
from malletrain.core.commands import ReleaseLeases, Rescale, Start, Stop, Suspend
from malletrain.core.controller import Controller
from malletrain.core.events import (
    CurveChanged,
    JobCancelled,
    JobCompleted,
    JobState,
    LayoutDue,
    LayoutFound,
    NodeJoined,
    NodeLeaving,
    NodeLost,
    RescaleFinished,
    RoundInterrupted,
    Tick,
    WeightChanged,
    WorkersFailed,
)
from malletrain.core.settings import ControllerSettings, PlanningSettings
from tests.malletrain.core.controller_script import (
    CHEAP,
    controller,
    gaps,
    job,
    nodes,
    play,
    running,
)

# --- the end of jobs ---


@pytest.mark.parametrize(
    ("event", "state", "reason"),
    [
        (JobCompleted("j"), JobState.COMPLETED, ""),
        (JobCancelled("j"), JobState.CANCELLED, "cancelled by its owner"),
    ],
)
def test_an_ended_job_frees_its_nodes_for_the_next(event, state, reason):
    c = controller(max_running=1)
    now = running(c)
    play(
        c,
        [
            (now, job("next", 1, 2)),
            (now + 5, Tick(), []),
            (now + 6, event, [Stop("j", state, reason)]),
        ],
    )
    assert play(c, [(now + 7, Tick())]) == [Start("next", ("a", "b"))]
    play(
        c,
        [
            (now + 8, event, []),
            (now + 8, WorkersFailed("j", "late"), []),
            (now + 9, RescaleFinished("j"), []),
        ],
    )


def test_a_broken_job_is_restarted_at_once_until_its_tries_are_used_up():
    c = controller(max_tries=3)
    now = running(c)
    again = [Rescale("j", ("a", "b"))]
    play(
        c,
        [
            (now, WorkersFailed("j", "first"), again),
            (now + 10, WorkersFailed("j", "second"), again),
        ],
    )
    play(c, [(now + 20, WorkersFailed("j", "third"), [Stop("j", JobState.FAILED, "third")])])
    assert all(node.job is None for node in c.nodes.values())


def test_tries_far_apart_do_not_add_up():
    c = controller(max_tries=2, retry_window_s=100.0)
    now = running(c)
    for i in range(5):
        play(c, [(now + 101 * i, WorkersFailed("j", "again"), [Rescale("j", ("a", "b"))])])
    assert c.jobs["j"].tries == 1


def test_tries_of_before_a_restart_count_and_grow_old_too():
    c = controller(max_tries=2, retry_window_s=100.0)
    play(
        c,
        [
            (1000.0, job(state=JobState.RUNNING, tries=1, last_failure_at=950.0)),
            *nodes("a", at=1000.0),
            (1001.0, Tick()),
        ],
    )
    play(c, [(1020.0, WorkersFailed("j", "again"), [Stop("j", JobState.FAILED, "again")])])
    c = controller(max_tries=2, retry_window_s=100.0)
    play(
        c,
        [
            (1000.0, job(state=JobState.RUNNING, tries=1, last_failure_at=10.0)),
            *nodes("a", at=1000.0),
            (1001.0, Tick()),
        ],
    )
    play(c, [(1020.0, WorkersFailed("j", "again"), [Rescale("j", ("a",))])])


def test_an_interrupted_round_is_formed_anew_and_costs_no_try():
    c = controller(max_tries=1)
    now = running(c)
    play(c, [(now, RoundInterrupted("j"), [Rescale("j", ("a", "b"))])])
    assert c.jobs["j"].tries == 0


def test_late_news_of_a_suspended_job_does_not_cost_it_its_place_in_the_queue():
    c = controller()
    now = running(c, low=2)
    play(c, [(now, NodeLost("b")), (now + 1, Tick(), [Suspend("j")])])
    since = c.jobs["j"].idle_since
    play(
        c,
        [
            (now + 3, RoundInterrupted("j"), []),
            (now + 4, WorkersFailed("j", "it was being stopped"), []),
            (now + 6, Tick(), []),
        ],
    )
    assert c.jobs["j"].idle_since == since


def test_a_broken_job_pays_the_restart_at_any_size_so_it_may_as_well_grow():
    """Growing costs as much as staying once the workers have to be restarted anyway."""
    c = Controller(
        ControllerSettings(
            PlanningSettings(t_fwd_s=20.0, cost=RescaleCost(up_s=15.0, down_s=15.0, start_s=0.0)),
            min_interval_s=0.0,
        )
    )
    curve = ScalingCurve.of({2: 100.0, 3: 140.0})
    play(
        c,
        [
            (0.0, job(low=2, high=3, curve=curve)),
            *nodes("a", "b"),
            (1.0, Tick()),
            (5.0, RescaleFinished("j")),
        ],
    )
    play(c, [*nodes("c", at=10.0), (11.0, Tick(), [])])  # growing does not pay for a job that runs
    play(c, [(12.0, WorkersFailed("j", "crashed"), [Rescale("j", ("a", "b", "c"))])])


# --- patience ---


def test_a_job_that_is_rescaling_is_left_alone_unless_it_must_change():
    c = controller()
    play(
        c,
        [
            (0.0, job()),
            *nodes("a"),
            (1.0, Tick(), [Start("j", ("a",))]),
            *nodes("b", at=2.0),
            (20.0, Tick(), []),
        ],
    )
    assert play(c, [(21.0, RescaleFinished("j")), (22.0, Tick())]) == [Rescale("j", ("a", "b"))]
    play(c, [(23.0, NodeLeaving("a", 10.0)), (24.0, Tick(), [Rescale("j", ("b",), within_s=9.0)])])


def test_growing_waits_for_the_interval_and_shrinking_does_not():
    c = controller(min_interval_s=30.0)
    play(
        c,
        [
            (0.0, job()),
            *nodes("a"),
            (1.0, Tick()),
            (5.0, RescaleFinished("j")),
            *nodes("b", at=10.0),
            (34.0, Tick(), []),
        ],
    )
    assert play(c, [(35.5, Tick())]) == [Rescale("j", ("a", "b"))]
    play(
        c,
        [
            (36.0, RescaleFinished("j")),
            (37.0, NodeLost("b")),
            (38.0, Tick(), [Rescale("j", ("a",))]),
        ],
    )


def test_a_rescale_that_nobody_chose_does_not_make_growing_wait():
    c = controller(min_interval_s=30.0)
    play(c, [(0.0, job()), *nodes("a", "b"), (1.0, Tick()), (5.0, RescaleFinished("j"))])
    play(
        c,
        [
            (40.0, NodeLeaving("b", 10.0)),
            (41.0, Tick(), [Rescale("j", ("a",), within_s=9.0)]),
            (42.0, RescaleFinished("j")),
        ],
    )
    play(c, [(43.0, NodeLost("b")), *nodes("c", at=44.0)])
    assert play(c, [(45.0, Tick())]) == [Rescale("j", ("a", "c"))]
    play(
        c, [(46.0, RescaleFinished("j")), *nodes("d", at=47.0), (75.0, Tick(), [])]
    )  # that one was chosen


def test_a_learned_curve_changes_the_plan():
    c = controller()
    now = running(c, on=("a", "b", "c", "d"))
    flat = CurveChanged("j", ScalingCurve.of({1: 100.0, 2: 60.0, 4: 20.0}), CHEAP)
    assert play(c, [(now, flat), (now + 1, Tick())]) == [Rescale("j", ("a",))]


# --- restart of the daemon ---


def test_a_new_weight_moves_nodes_to_the_job_that_counts_more():
    c = controller(min_interval_s=0.0)
    linear = ScalingCurve.of((k, 100.0 * k) for k in range(1, 4))
    play(c, [(0.0, job("a", 1, 3, curve=linear, weight=2.0)), (0.0, job("b", 1, 3, curve=linear))])
    play(c, [*nodes("n1", "n2", "n3", "n4"), (1.0, Tick()), (5.0, RescaleFinished("a"))])
    play(c, [(5.0, RescaleFinished("b"))])
    assert [len(c.jobs[name].nodes) for name in "ab"] == [3, 1]
    play(c, [(10.0, WeightChanged("b", 8.0)), (12.0, Tick())])
    assert [len(c.jobs[name].nodes) for name in "ab"] == [1, 3]


def test_after_a_restart_nothing_is_planned_before_everybody_had_time_to_report():
    c = controller(release_after_s=1.0)
    c.hold(110.0)
    script = [
        (100.0, job("j", 2, 2, state=JobState.RUNNING)),
        (100.0, job("k", 1, 1, state=JobState.QUEUED)),
        (101.0, NodeJoined("a", job="j")),
        (101.0, NodeJoined("c")),
        (104.0, gaps("d"), []),
        (108.0, NodeJoined("b", job="j")),
        (109.9, Tick(), []),
        (110.0, Tick(), [Start("k", ("c",))]),
    ]
    play(c, script)
    assert c.jobs["j"].nodes == ("a", "b")


def test_while_held_the_controller_does_not_ask_to_be_woken():
    c = controller(release_after_s=1.0)
    c.hold(50.0)
    play(c, nodes("a", "b"))
    assert c.next_wakeup() == 50.0
    play(c, [(50.0, Tick(), [ReleaseLeases(("a", "b"))])])
    assert c.next_wakeup() is None


def test_while_held_nobody_is_found_to_starve_and_afterwards_everybody_who_does():
    c = controller(starvation_s=20.0)
    play(c, [(0.0, job("j", 2, 2)), *nodes("a"), (1.0, gaps("b"))])
    assert c.jobs["j"].idle_since == 1.0, "it is in reach"
    c.hold(50.0)
    play(c, [(30.0, Tick(), [])])
    assert not c.jobs["j"].starving
    assert c.next_wakeup() == 50.0
    play(c, [(50.0, Tick())])
    assert c.jobs["j"].starving


def test_a_job_whose_nodes_did_not_come_back_is_suspended_or_started_anew():
    c = controller()
    c.hold(10.0)
    play(
        c,
        [
            (0.0, job(low=2, state=JobState.RUNNING)),
            (1.0, NodeJoined("a", job="j")),
            (10.0, Tick(), [Suspend("j")]),
        ],
    )
    c = controller()
    c.hold(10.0)
    play(c, [(0.0, job(state=JobState.RUNNING)), *nodes("z"), (10.0, Tick(), [Start("j", ("z",))])])


def test_a_start_that_the_store_did_not_live_to_see_is_carried_out_again():
    c = controller()
    c.hold(10.0)
    play(
        c,
        [
            (0.0, job(state=JobState.QUEUED)),
            (1.0, NodeJoined("a", job="j")),
            (10.0, Tick(), [Rescale("j", ("a",))]),
        ],
    )
    assert c.jobs["j"].state is JobState.RUNNING


def test_nodes_that_hold_an_ended_or_unknown_job_are_free():
    c = controller()
    play(
        c,
        [
            (0.0, job("done", state=JobState.COMPLETED)),
            (0.0, job("j")),
            (0.5, NodeJoined("a", job="done")),
        ],
    )
    assert play(c, [(0.5, NodeJoined("b", job="never-heard-of")), (1.0, Tick())]) == [
        Start("j", ("a", "b"))
    ]


@pytest.mark.parametrize("start", [0.1, 1e9 + 0.1, 1722222222.7])
def test_a_wake_up_is_never_at_a_time_that_rounding_has_not_reached(start):
    """A virtual clock goes exactly where the controller asks; it must not have to go there
    twice.
    """
    c = controller(starvation_s=0.3, release_after_s=0.7, debounce_s=0.1, max_running=3)
    for i in range(4):
        c.handle(job(f"j{i}", 2, 2), start)
    for name in "abc":
        c.handle(NodeJoined(name), start + 0.05)
    now = start
    for _ in range(200):
        due = c.next_wakeup()
        if due is None:
            break
        assert due > now or c.handle(Tick(), due) or c.next_wakeup() != due, f"woken twice at {due}"
        now = max(now, due)
        c.handle(Tick(), now)
        for name, record in c.jobs.items():
            if record.rescaling:
                c.handle(RescaleFinished(name), now)


# --- the layout of the nodes ---


def test_another_layout_restarts_the_workers_on_the_same_nodes():
    c = controller()
    now = running(c)
    again = [Rescale("j", ("a", "b"), new_layout=True)]
    play(c, [(now, LayoutDue("j"), again), (now + 1, LayoutDue("j"), [])])  # it has begun
    play(c, [(now + 3, RescaleFinished("j")), (now + 4, LayoutDue("j"), again)])
    assert c.jobs["j"].tries == 0


def test_a_layout_does_not_change_while_the_nodes_do():
    c = controller()
    now = running(c)
    play(c, [(now, NodeLeaving("b", 60.0)), (now, LayoutDue("j"), [])])
    play(c, [(now + 3, Tick(), [Rescale("j", ("a",), 59.0)]), (now + 3, LayoutDue("j"), [])])
    play(c, [(now + 5, JobCompleted("j"), [Stop("j", JobState.COMPLETED, "")])])
    play(c, [(now + 6, LayoutDue("j"), []), (now + 6, LayoutFound("j", "2 × 1"), [])])
