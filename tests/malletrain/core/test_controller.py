"""The controller as tables: events in, commands out."""

from __future__ import annotations

import pytest

from allocator import RescaleCost, ScalingCurve
from malletrain.core.controller import Controller
from malletrain.core.events import (
    CurveLearned,
    GapsSeen,
    JobCancelled,
    JobCompleted,
    JobState,
    JobSubmitted,
    LeaseNotTaken,
    NodeJoined,
    NodeLeaving,
    NodeLost,
    NodeRejected,
    ReleaseLeases,
    Rescale,
    RescaleFinished,
    RoundInterrupted,
    Start,
    Stop,
    Suspend,
    TakeLeases,
    Tick,
    WorkersFailed,
)
from malletrain.core.settings import ControllerSettings, PlanningSettings

CHEAP = RescaleCost(up_s=1.0, down_s=1.0, start_s=1.0)


def controller(**changes):
    planning = PlanningSettings(cost=CHEAP, max_running=changes.pop("max_running", 20))
    patience = {"starvation_s": 100.0, "min_interval_s": 0.0, "notice_debounce_s": 1.0}
    return Controller(ControllerSettings(planning, **{**patience, **changes}))


def play(c, script):
    """Feed ``(time, event)`` or ``(time, event, commands)``: exactly these must come, since the
    line before.

    Ticks happen where the controller asks for them.
    """
    said = []
    for time, event, *expected in script:
        commands = []
        while (due := c.next_wakeup()) is not None and due < time:
            commands += c.handle(Tick(), due)
        commands += c.handle(event, time)
        if expected:
            assert commands == expected[0], f"until {time}: {commands}"
        said += commands
    return said


def nodes(*names, at=0.0, **more):
    return [(at, NodeJoined(name, **more)) for name in names]


def job(name="j", low=1, high=4, **more):
    return JobSubmitted(name, low, high, **more)


def running(c, low=1, high=4, on=("a", "b"), name="j"):
    """A job that runs on nodes; returns the time."""
    now = 0.0
    play(
        c,
        [
            (now, job(name, low, high)),
            *nodes(*on),
            (1.0, Tick()),
            (5.0, RescaleFinished(name)),
            (6.5, Tick()),
        ],
    )
    assert set(c.jobs[name].nodes) == set(on)
    return 10.0


# --- start, grow, shrink, lose ---


def test_a_job_starts_on_what_is_there_after_the_settle_time():
    c = controller()
    play(
        c,
        [
            (0.0, job()),
            *nodes("a", at=0.2),
            *nodes("b", at=0.9),
            (0.95, Tick(), []),
            (1.0, Tick(), [Start("j", ("a", "b"))]),
        ],
    )
    assert c.jobs["j"].state is JobState.RUNNING
    assert c.plans == 1


def test_nodes_that_join_make_the_job_grow_and_keep_what_it_has_first():
    c = controller()
    now = running(c, on=("b",))
    assert play(c, [*nodes("a", "c", at=now), (now + 1, Tick())]) == [Rescale("j", ("b", "a", "c"))]


def test_a_job_takes_no_more_than_its_maximum():
    c = controller()
    play(c, [(0.0, job(high=2)), *nodes("a", "b", "c"), (1.0, Tick(), [Start("j", ("a", "b"))])])


def test_leaving_shrinks_in_time_and_says_how_much_is_left():
    c = controller()
    now = running(c)
    play(
        c,
        [
            (now, NodeLeaving("b", 30.0), []),
            (now + 1.0, Tick(), [Rescale("j", ("a",), within_s=29.0)]),
        ],
    )


def test_with_short_notice_the_settle_time_is_cut():
    c = controller()
    now = running(c)
    assert play(c, [(now, NodeLeaving("b", 2.0)), (now + 0.5, Tick())]) == [
        Rescale("j", ("a",), within_s=1.5)
    ]
    c = controller()
    now = running(c)
    assert play(c, [(now, NodeLeaving("b", 0.0))]) == [Rescale("j", ("a",), within_s=0.0)]


def test_notices_settle_for_as_long_as_the_main_scheduler_may_wait():
    c = controller(notice_debounce_s=0.3)
    now = running(c, on=("a", "b", "c"))
    notices = [(now, NodeLeaving("b", 20.0)), (now + 0.2, NodeLeaving("c", 20.0))]
    assert play(c, [*notices, (now + 0.25, Tick(), []), (now + 0.3, Tick())]) == [
        Rescale("j", ("a",), within_s=19.7)
    ]


def test_a_leaver_that_goes_afterwards_changes_nothing_any_more():
    c = controller()
    now = running(c)
    play(
        c,
        [
            (now, NodeLeaving("b", 5.0)),
            (now + 1, Tick()),
            (now + 4, NodeLost("b"), []),
            (now + 9, Tick(), []),
        ],
    )
    assert c.jobs["j"].nodes == ("a",)


def test_two_losses_within_the_settle_time_are_one_plan():
    c = controller()
    now = running(c, on=("a", "b", "c"))
    plans = c.plans
    said = play(c, [(now, NodeLost("a")), (now + 0.9, NodeLost("c")), (now + 1.0, Tick())])
    assert said == [Rescale("j", ("b",))]
    assert c.plans == plans + 1


def test_a_lost_node_is_replaced_by_a_free_one_in_the_same_rescale():
    c = controller()
    now = running(c, high=2)
    assert play(c, [*nodes("z", at=now), (now + 2, NodeLost("a")), (now + 3, Tick())]) == [
        Rescale("j", ("b", "z"))
    ]


def test_a_loss_while_a_rescale_is_under_way_is_planned_at_once():
    c = controller()
    now = running(c)
    said = play(
        c, [*nodes("c", at=now), (now + 1, Tick()), (now + 3, NodeLost("c")), (now + 4, Tick())]
    )
    assert said == [Rescale("j", ("a", "b", "c")), Rescale("j", ("a", "b"))]
    assert c.jobs["j"].rescaling


def test_a_node_that_joins_again_without_a_loss_was_lost():
    c = controller()
    now = running(c)
    (said,) = play(c, [*nodes("b", at=now), (now + 1, Tick())])
    assert said == Rescale("j", ("a", "b"))


def test_late_news_of_unknown_nodes_is_ignored():
    c = controller()
    assert (
        play(
            c,
            [
                (0.0, news)
                for news in (
                    NodeLost("x"),
                    NodeLeaving("x", 5.0),
                    NodeRejected("x"),
                    LeaseNotTaken("x"),
                )
            ],
        )
        == []
    )


def test_unknown_and_doubled_jobs_are_the_shells_mistake():
    c = controller()
    with pytest.raises(KeyError):
        c.handle(JobCompleted("x"), 0.0)
    c.handle(job(), 0.0)
    with pytest.raises(ValueError, match="before"):
        c.handle(job(), 0.0)


# --- under the minimum ---


def test_under_its_minimum_a_job_is_suspended_and_starts_again_in_its_old_order():
    c = controller(max_running=1)
    play(
        c,
        [
            (0.0, job("first", 2, 2)),
            (0.0, job("second", 2, 2)),
            *nodes("a", "b"),
            (1.0, Tick(), [Start("first", ("a", "b"))]),
        ],
    )
    play(
        c,
        [
            (5.0, RescaleFinished("first")),
            (10.0, NodeLeaving("b", 20.0)),
            (11.0, Tick(), [Suspend("first", within_s=19.0)]),
        ],
    )
    assert c.jobs["first"].state is JobState.SUSPENDED
    assert play(c, [*nodes("c", at=20.0), (21.0, Tick())]) == [Start("first", ("a", "c"))]
    assert c.jobs["second"].state is JobState.QUEUED


def test_a_job_that_lost_all_its_nodes_is_suspended_or_started_elsewhere():
    c = controller()
    now = running(c)
    play(c, [(now, NodeLost("a")), (now, NodeLost("b")), (now + 1, Tick(), [Suspend("j")])])
    c = controller()
    now = running(c)
    assert play(
        c, [(now, NodeLost("a")), (now, NodeLost("b")), *nodes("z", at=now), (now + 1, Tick())]
    ) == [Start("j", ("z",))]


def test_a_job_that_fits_nowhere_waits_and_holds_nobody_up():
    c = controller(max_running=1)
    play(
        c,
        [
            (0.0, job("giant", 50, 60)),
            (0.0, job("small", 1, 1)),
            *nodes("a", "b"),
            (1.0, Tick(), [Start("small", ("a",))]),
        ],
    )
    assert c.jobs["giant"].state is JobState.QUEUED
    assert not c.jobs["giant"].starving


def test_losses_never_fail_a_job():
    c = controller(max_tries=1)
    now = running(c, low=1)
    for i in range(20):
        for name in c.jobs["j"].nodes:
            play(c, [(now, NodeLost(name))])
        play(c, [(now + 1, Tick()), *nodes(f"n{i}", at=now + 2), (now + 3, Tick())])
        now += 10
    assert c.jobs["j"].state is JobState.RUNNING
    assert c.jobs["j"].tries == 0


# --- allowed sizes and classes ---


def test_only_allowed_sizes_are_given():
    c = controller()
    play(
        c,
        [
            (0.0, job(high=8, sizes=(1, 2, 4, 8))),
            *nodes(*"abc"),
            (1.0, Tick(), [Start("j", ("a", "b"))]),
        ],
    )
    now = 10.0
    play(
        c,
        [
            (5.0, RescaleFinished("j")),
            *nodes("d", at=now),
            (now + 1, Tick(), [Rescale("j", ("a", "b", "c", "d"))]),
        ],
    )


def test_a_job_with_no_allowed_size_within_its_limits_never_runs_and_breaks_nothing():
    c = controller()
    play(
        c,
        [
            (0.0, job("odd", 3, 3, sizes=(2, 4))),
            (0.0, job("j")),
            *nodes("a"),
            (1.0, Tick(), [Start("j", ("a",))]),
        ],
    )


def test_a_job_runs_on_one_class_and_stays_there():
    c = controller()
    play(c, [(0.0, job(high=8)), *nodes("a", "b"), *nodes("g1", "g2", "g3", node_class="gpu")])
    assert play(c, [(1.0, Tick())]) == [Start("j", ("g1", "g2", "g3"))]
    play(c, [(5.0, RescaleFinished("j")), *nodes("c", at=10.0), (11.0, Tick(), [])])
    assert play(c, [*nodes("g4", at=20.0, node_class="gpu"), (21.0, Tick())]) == [
        Rescale("j", ("g1", "g2", "g3", "g4"))
    ]


def test_two_jobs_share_the_machine_by_weight():
    c = controller()
    play(
        c,
        [
            (0.0, job("light", 1, 4)),
            (0.0, job("heavy", 1, 4, weight=10.0)),
            *nodes(*"abcde"),
            (1.0, Tick()),
        ],
    )
    assert (len(c.jobs["light"].nodes), len(c.jobs["heavy"].nodes)) == (1, 4)


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
            (1000.0, job(state=JobState.RUNNING, tries=1, last_broke=950.0)),
            *nodes("a", at=1000.0),
            (1001.0, Tick()),
        ],
    )
    play(c, [(1020.0, WorkersFailed("j", "again"), [Stop("j", JobState.FAILED, "again")])])
    c = controller(max_tries=2, retry_window_s=100.0)
    play(
        c,
        [
            (1000.0, job(state=JobState.RUNNING, tries=1, last_broke=10.0)),
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


# --- admission and turns ---


def test_first_come_first_served_up_to_max_running():
    c = controller(max_running=2)
    play(c, [(0.0, job(x, 1, 1)) for x in ("one", "two", "three")])
    assert play(c, [*nodes(*"abc"), (1.0, Tick())]) == [Start("one", ("a",)), Start("two", ("b",))]
    play(c, [(5.0, JobCompleted("one")), (6.0, Tick(), [Start("three", ("a",))])])


def test_a_job_that_loses_its_place_to_an_earlier_one_lets_go_of_its_nodes():
    c = controller(max_running=1)
    play(
        c,
        [
            (0.0, job("wide", 3, 3)),
            (0.0, job("narrow", 1, 1)),
            *nodes("a"),
            (1.0, Tick(), [Start("narrow", ("a",))]),
        ],
    )
    said = play(c, [(2.0, RescaleFinished("narrow")), *nodes("b", "c", at=10.0), (11.0, Tick())])
    assert said == [Suspend("narrow"), Start("wide", ("a", "b", "c"))]


def test_a_starving_job_gets_its_minimum_for_a_while_and_then_the_next():
    c = controller(starvation_s=100.0)
    play(
        c,
        [
            (0.0, job("rich", 1, 2, weight=100.0)),
            (0.0, job("poor", 2, 2)),
            *nodes("a", "b"),
            (1.0, Tick()),
        ],
    )
    play(c, [(5.0, RescaleFinished("rich"))])
    assert play(c, [(100.5, Tick())]) == [Suspend("rich"), Start("poor", ("a", "b"))]
    play(c, [(101.0, RescaleFinished("poor")), (150.0, Tick(), [])])
    assert play(c, [(200.5, Tick())]) == [Suspend("poor"), Start("rich", ("a", "b"))]


def test_small_jobs_do_not_overtake_a_large_one_in_the_queue_for_a_turn():
    c = controller(starvation_s=100.0)
    wide = job("wide", 4, 4, curve=ScalingCurve.of({4: 1.0}))
    small = [job(f"s{i}", 2, 2, weight=5.0, curve=ScalingCurve.of({2: 50.0})) for i in range(4)]
    play(c, [(0.0, wide), *((0.0, s) for s in small), *nodes(*"abcd"), (1.0, Tick())])
    now, runs = 1.0, {}
    while now < 700.0:
        now += 5.0
        for command in play(c, [(now, Tick())]):
            if isinstance(command, Start):
                runs.setdefault(command.job, now)
        for name, record in c.jobs.items():
            if record.rescaling:
                play(c, [(now, RescaleFinished(name))])
    assert set(runs) >= {"wide", "s2", "s3"}
    assert runs["wide"] <= 110.0


def test_a_starving_job_that_gets_nodes_out_of_turn_gives_them_up_to_the_one_before_it():
    c = controller(starvation_s=100.0)
    play(
        c,
        [
            *nodes(*"abcd"),
            (0.0, job("f1", 2, 2, weight=9.0)),
            (0.0, job("f2", 2, 2, weight=9.0)),
            (1.0, Tick()),
        ],
    )
    play(
        c,
        [
            (5.0, RescaleFinished("f1")),
            (5.0, RescaleFinished("f2")),
            (50.0, job("first", 2, 2, weight=5.0)),
        ],
    )
    play(c, [(60.0, job("wide", 4, 4, weight=0.1)), (70.0, job("small", 2, 2, weight=4.0))])
    (_, started) = play(c, [(155.0, Tick())])
    assert started.job == "first"
    play(
        c,
        [
            (160.0, RescaleFinished("first")),
            (200.0, JobCancelled("f1")),
            (200.0, JobCancelled("f2")),
        ],
    )
    (started,) = play(c, [(202.0, Tick())])
    assert started.job == "small"
    said = play(c, [(205.0, RescaleFinished("small")), (251.0, Tick())])
    assert [type(x) for x in said] == [Suspend, Suspend, Start]
    assert said[-1].job == "wide"


def test_the_nodes_for_the_next_turn_are_asked_for_while_another_has_its_own():
    c = controller(starvation_s=100.0)
    small = [job(f"s{i}", 2, 2, weight=5.0, curve=ScalingCurve.of({2: 50.0})) for i in range(2)]
    play(
        c,
        [
            (0.0, job("wide", 3, 3, curve=ScalingCurve.of({3: 1.0}))),
            *((0.0, s) for s in small),
            *nodes("a", "b"),
            (1.0, Tick()),
        ],
    )
    holder = next(name for name, record in c.jobs.items() if record.nodes)
    play(
        c,
        [
            (5.0, RescaleFinished(holder)),
            (6.0, gaps("c"), []),
            (101.0, Tick()),
            (107.0, Tick(), [TakeLeases(("c",))]),
        ],
    )


def test_waiting_in_the_queue_is_not_starving():
    c = controller(max_running=1, starvation_s=100.0)
    now = running(c)
    play(c, [(now, job("next", 1, 1)), (now + 500, Tick(), [])])
    assert c.jobs["next"].idle_since is None
    play(c, [(now + 501, JobCompleted("j")), (now + 502, Tick(), [Start("next", ("a",))])])


# --- leases ---


def gaps(*names, horizon=None, node_class="default"):
    return GapsSeen(dict.fromkeys(names, (horizon, node_class)))


def test_as_many_leases_as_are_of_use():
    c = controller()
    play(c, [(0.0, job(high=2)), (2.0, gaps(*"abcde"), [TakeLeases(("a", "b"))])])
    play(
        c, [(4.0, gaps("c", "d", "e"), [])]
    )  # the two are on their way, although the poll does not show them any more
    play(
        c,
        [
            *nodes("a", "b", at=5.0),
            (6.0, Tick(), [Start("j", ("a", "b"))]),
            (7.0, gaps("c", "d", "e"), []),
        ],
    )


def test_no_leases_without_jobs_and_none_for_a_job_that_the_gaps_cannot_hold():
    c = controller()
    play(c, [(0.0, gaps("a", "b"), [])])
    play(
        c,
        [
            (1.0, job(low=3)),
            (3.0, gaps("a", "b"), []),
            (4.0, gaps("a", "b", "c"), [TakeLeases(("a", "b", "c"))]),
        ],
    )


def test_the_longest_gaps_are_taken_first_and_short_ones_are_left_alone():
    c = controller(min_horizon_s=60.0)
    seen = GapsSeen(
        {
            "a": (30.0, "default"),
            "b": (100.0, "default"),
            "c": (None, "default"),
            "d": (500.0, "default"),
        }
    )
    play(c, [(0.0, job(high=2)), (2.0, seen, [TakeLeases(("c", "d"))])])
    c = controller(min_horizon_s=60.0)
    play(c, [(0.0, job(high=9)), (2.0, seen, [TakeLeases(("c", "d", "b"))])])


def test_leases_are_asked_for_in_one_class_when_a_job_needs_them_together():
    c = controller()
    seen = GapsSeen(
        {"a": (None, "default"), "g1": (9.0, "gpu"), "g2": (9.0, "gpu"), "g3": (9.0, "gpu")}
    )
    play(c, [(0.0, job(low=3, high=3)), (2.0, seen, [TakeLeases(("g1", "g2", "g3"))])])


def test_a_lease_that_was_refused_is_not_asked_for_before_the_next_poll_and_then_more_and_more_rarely():  # noqa: E501
    c = controller()
    play(
        c,
        [(0.0, job(high=1)), (2.0, gaps("a"), [TakeLeases(("a",))]), (3.0, LeaseNotTaken("a"), [])],
    )
    play(c, [(3.1, job("another")), (4.9, Tick(), []), (5.0, gaps("a"), [TakeLeases(("a",))])])
    play(c, [(5.5, LeaseNotTaken("a"), []), (6.0, gaps("a"), [])])
    play(
        c,
        [
            (10.0, gaps("a"), [TakeLeases(("a",))]),
            (10.5, LeaseNotTaken("a"), []),
            (15.0, gaps("a"), []),
        ],
    )


def test_a_lease_that_does_not_come_up_is_forgotten_after_a_while():
    c = controller(lease_wait_s=60.0)
    play(c, [(0.0, job(high=1)), (2.0, gaps("a"), [TakeLeases(("a",))]), (30.0, gaps("a"), [])])
    play(c, [(62.0, gaps("a"), [TakeLeases(("a",))])])


def test_a_lease_nobody_uses_is_given_back_and_not_taken_again():
    c = controller(release_after_s=30.0)
    play(
        c,
        [
            (0.0, job(high=1)),
            *nodes("a", "b"),
            (1.0, Tick(), [Start("j", ("a",))]),
            (5.0, RescaleFinished("j")),
            (29.0, Tick(), []),
        ],
    )
    assert play(c, [(31.0, Tick())]) == [ReleaseLeases(("b",))]
    play(c, [(35.0, gaps("b"), []), (40.0, gaps("b"), []), (400.0, Tick(), [])])
    assert c.next_wakeup() is None


def test_a_lease_that_waits_for_more_of_its_kind_is_kept():
    c = controller(release_after_s=10.0)
    play(c, [(0.0, job(low=2, high=2)), *nodes("a")])
    play(
        c,
        [
            (2.0, gaps("b"), [TakeLeases(("b",))]),
            (15.0, Tick(), []),
            *nodes("b", at=18.0),
            (19.0, Tick(), [Start("j", ("a", "b"))]),
        ],
    )


def test_a_lease_is_not_given_back_while_a_rescale_that_would_use_it_is_under_way():
    c = controller(release_after_s=10.0)
    play(c, [(0.0, job()), *nodes("a"), (1.0, Tick()), *nodes("b", at=2.0), (90.0, Tick(), [])])
    assert play(c, [(100.0, RescaleFinished("j")), (101.0, Tick())]) == [Rescale("j", ("a", "b"))]


@pytest.mark.parametrize("give_back", [0.0, 5.0, 30.0])
def test_leases_do_not_flap(give_back):
    """A world in which every lease asked for comes up: nobody is given back and then asked for
    again.
    """
    c = controller(release_after_s=give_back)
    play(c, [(0.0, job("one", 2, 3)), (0.0, job("two", 1, 2)), (0.0, job("big", 30, 30))])
    free, now, given = {f"n{i}": ("gpu" if i > 4 else "default") for i in range(9)}, 2.0, []
    for _ in range(60):
        seen = GapsSeen({n: (None, k) for n, k in free.items() if n not in c.nodes})
        for command in play(c, [(now, seen)]):
            if isinstance(command, TakeLeases):
                assert not set(command.nodes) & set(given)
                play(c, [(now + 1, NodeJoined(n, free[n])) for n in command.nodes])
            elif isinstance(command, ReleaseLeases):
                given += command.nodes
        for name, record in c.jobs.items():
            if record.rescaling:
                play(c, [(now + 1, RescaleFinished(name))])
        given += [
            n
            for command in play(c, [(now + 2.5, Tick())])
            if isinstance(command, ReleaseLeases)
            for n in command.nodes
        ]
        now += 5.0
    assert sorted(len(record.nodes) for record in c.jobs.values()) == [0, 2, 3]
    assert len(c.nodes) == 5


def test_an_unfit_node_is_given_back_and_left_alone_for_a_while():
    c = controller(rejected_s=100.0)
    now = running(c)
    play(
        c,
        [
            (now, NodeRejected("b"), [ReleaseLeases(("b",))]),
            (now + 2, Tick(), []),
            (now + 5, gaps("b"), []),
        ],
    )
    assert c.jobs["j"].nodes == ("a",)
    play(c, [(now + 101, gaps("b"), [TakeLeases(("b",))])])


def test_a_job_left_under_its_minimum_by_an_unfit_node_does_not_hang_in_its_rescale():
    c = controller()
    play(
        c,
        [
            (0.0, job(low=2, high=2)),
            *nodes("a", "b"),
            (1.0, Tick()),
            (2.0, NodeRejected("b")),
            (3.0, Tick(), [Suspend("j")]),
        ],
    )


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
    flat = CurveLearned("j", ScalingCurve.of({1: 100.0, 2: 60.0, 4: 20.0}), CHEAP)
    assert play(c, [(now, flat), (now + 1, Tick())]) == [Rescale("j", ("a",))]


# --- restart of the daemon ---


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
