"""Which leases are taken, released and reclaimed."""

from __future__ import annotations

import pytest

from malletrain.core.events import (
    GapsSeen,
    LeaseNotTaken,
    NodeJoined,
    NodeRejected,
    ReleaseLeases,
    Rescale,
    RescaleFinished,
    Start,
    Suspend,
    TakeLeases,
    Tick,
)
from tests.malletrain.core.controller_script import (
    controller,
    gaps,
    job,
    nodes,
    play,
    running,
)


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
