"""The controller as tables: events in, commands out."""

from __future__ import annotations

import pytest

from malletrain.core.commands import Rescale, Start, Suspend
from malletrain.core.events import (
    JobCompleted,
    JobState,
    LeaseNotTaken,
    NodeLeaving,
    NodeLost,
    NodeRejected,
    RescaleFinished,
    Tick,
)
from tests.malletrain.core.controller_script import (
    controller,
    job,
    nodes,
    play,
    running,
)

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
    commands = play(c, [(now, NodeLost("a")), (now + 0.09, NodeLost("c")), (now + 0.1, Tick())])
    assert commands == [Rescale("j", ("b",))]
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
    commands = play(
        c, [*nodes("c", at=now), (now + 1, Tick()), (now + 3, NodeLost("c")), (now + 4, Tick())]
    )
    assert commands == [Rescale("j", ("a", "b", "c")), Rescale("j", ("a", "b"))]
    assert c.jobs["j"].rescaling


def test_a_node_that_joins_again_without_a_loss_was_lost():
    c = controller()
    now = running(c)
    (command,) = play(c, [*nodes("b", at=now), (now + 1, Tick())])
    assert command == Rescale("j", ("a", "b"))


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


def test_more_jobs_run_at_once_when_that_is_allowed_meanwhile():
    c = controller(max_running=1)
    began = [(0.0, job("first", 1, 1)), (0.0, job("second", 1, 1)), *nodes("a", "b")]
    play(c, [*began, (1.0, Tick(), [Start("first", ("a",))])])
    c.queue.allow(2)
    c.state.plan_soon(5.0)
    assert play(c, [(5.0, Tick())]) == [Start("second", ("b",))]
