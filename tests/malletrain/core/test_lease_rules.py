"""What a site's rules about leases do: a least charge, a least length, a limit for each user, and
the pace at which leases may be asked for.
"""

from __future__ import annotations

import pytest

from malletrain.core.commands import ReclaimNodes, ReleaseLeases, TakeLeases
from malletrain.core.events import (
    GapsSeen,
    JobCancelled,
    LeaseDeferred,
    NodeJoined,
    NodeLost,
    NodeRejected,
    RescaleFinished,
    Tick,
)
from tests.malletrain.core.controller_script import controller, gaps, job, play, running

HOUR = 3600.0


def released(commands):
    return [c.nodes for c in commands if isinstance(c, ReleaseLeases)]


def taken(commands):
    return {c.owner: c.nodes for c in commands if isinstance(c, TakeLeases)}


@pytest.mark.parametrize(
    ("settings", "horizon", "expected"),
    [
        ({"min_charge_s": HOUR}, HOUR / 2, {}),
        ({"min_charge_s": HOUR}, HOUR, {"": ("a",)}),
        ({"min_charge_s": HOUR}, None, {"": ("a",)}),
        ({"min_lease_s": HOUR}, HOUR / 2, {}),
        ({"min_lease_s": HOUR / 4, "min_charge_s": HOUR}, HOUR / 2, {}),
        ({"min_lease_s": HOUR / 4}, HOUR / 2, {"": ("a",)}),
        ({"min_horizon_s": HOUR, "min_charge_s": 60.0}, HOUR / 2, {}),
        ({}, 1.0, {"": ("a",)}),
    ],
)
def test_a_gap_that_is_over_before_its_charge_is_used_up_is_not_leased(settings, horizon, expected):
    c = controller(**settings)
    assert taken(play(c, [(0.0, job()), (2.0, gaps("a", horizon=horizon))])) == expected


def test_a_lease_that_is_paid_for_is_kept_while_its_owner_could_use_it():
    """The job could use four nodes, or one; there are three."""
    c = controller(min_charge_s=600.0, release_after_s=30.0)
    play(c, [(0.0, job("j", 1, 4, sizes=(1, 4))), (0.0, NodeJoined("a", leased_s=100.0))])
    play(c, [(0.0, NodeJoined("b", leased_s=100.0)), (0.0, NodeJoined("c", leased_s=550.0))])
    assert released(play(c, [(49.0, Tick())])) == []
    assert c.jobs["j"].nodes == ("a",)
    assert released(play(c, [(70.0, Tick())])) == [("c",)], "its charge was used up at 50 s"
    assert released(play(c, [(499.0, Tick())])) == []
    assert released(play(c, [(501.0, Tick())])) == [("b",)]
    assert set(c.nodes) == {"a"}


def test_nobody_keeps_a_paid_lease_of_which_no_job_can_make_use():
    c = controller(min_charge_s=HOUR)
    running(c, high=2, on=("a", "b"))
    play(c, [(10.0, NodeJoined("c"))])
    commands = play(c, [(60.0, Tick())])
    assert ReleaseLeases(("c",)) in commands, "the job is as large as it can be"
    commands = play(c, [(61.0, JobCancelled("j")), (100.0, Tick())])
    assert ReleaseLeases(("a", "b")) in commands


@pytest.mark.parametrize(("charge_s", "reclaims"), [(0.0, True), (HOUR, False)])
def test_a_paid_lease_is_not_reclaimed_for_another_owner(charge_s, reclaims):
    c = controller(min_charge_s=charge_s)
    play(c, [(0.0, job("a", 1, 4, owner="ann"))])
    play(c, [(0.0, NodeJoined(f"n{k}", owner="ann")) for k in range(4)])
    play(c, [(10.0, Tick()), (11.0, RescaleFinished("a"))])
    assert len(c.jobs["a"].nodes) == 4
    commands = play(c, [(200.0, job("b", 1, 4, owner="bob")), (400.0, gaps()), (600.0, gaps())])
    assert any(isinstance(x, ReclaimNodes) for x in commands) is reclaims


def test_one_owner_has_no_more_leases_than_allowed():
    c = controller(max_leases_per_owner=3)
    play(c, [(0.0, job("j", 1, 9)), (0.0, NodeJoined("x"))])
    commands = play(c, [(2.0, gaps(*"abcdef"))])
    assert taken(commands) == {"": ("a", "b")}
    assert taken(play(c, [(3.0, gaps(*"cdef"))])) == {}, "two are on their way"
    play(c, [(4.0, NodeJoined("a")), (4.0, NodeJoined("b"))])
    assert taken(play(c, [(6.0, gaps(*"cdef"))])) == {}
    play(c, [(7.0, NodeLost("a"))])
    assert taken(play(c, [(8.0, gaps(*"cdef"))])) == {"": ("c",)}


def test_the_limit_is_each_owners_own():
    c = controller(max_leases_per_owner=2)
    play(c, [(0.0, job("j", 1, 9, owner="ann")), (0.0, job("k", 1, 9, owner="bob"))])
    requests = taken(play(c, [(2.0, gaps(*"abcdef"))]))
    assert {owner: len(names) for owner, names in requests.items()} == {"ann": 2, "bob": 2}


def test_no_more_is_asked_for_than_the_pace_allows_although_a_plan_counts_on_all():
    """The job needs six nodes to run at all."""
    c = controller()
    everything = dict.fromkeys("abcdef", (None, "default"))
    play(c, [(0.0, job("j", 6, 6))])
    requested_nodes = []
    for at, room in ((2.0, 4), (7.0, 0), (12.0, 1), (17.0, 9)):
        remaining = {n: gap for n, gap in everything.items() if n not in requested_nodes}
        batch = taken(play(c, [(at, GapsSeen(remaining, room))])).get("", ())
        requested_nodes += batch
        assert len(batch) <= room
    assert requested_nodes == list("abcdef")


def test_what_was_not_asked_for_yet_is_asked_for_after_the_next_poll_and_was_no_refusal():
    """It happens six times: so many refusals would have the nodes and the owner left alone."""
    c = controller(rejected_s=300.0)
    play(c, [(0.0, job("j", 1, 2, owner="ann"))])
    at = 2.0
    for _ in range(6):
        assert taken(play(c, [(at, gaps("a", "b"))])) == {"ann": ("a", "b")}
        commands = play(c, [(at + 0.1, LeaseDeferred(n, "ann")) for n in ("a", "b")])
        commands += play(c, [(at + 0.2, job(f"k{at}", 1, 1, owner="ann"))])
        commands += play(c, [(at + 3.0, Tick())])
        assert taken(commands) == {}, "not before the next poll"
        assert not c.gaps.backing_off("ann", at + 3.0)
        at += 5.0


def test_gaps_there_is_no_room_for_yet_are_no_reason_to_reclaim():
    c = controller(release_after_s=1000.0)
    play(c, [(0.0, job("a", 1, 9, owner="ann"))])
    play(c, [(0.0, NodeJoined(f"n{k}", owner="ann")) for k in range(2)])
    play(c, [(100.0, job("b", 1, 1, owner="bob"))])
    open_gaps = dict.fromkeys("xyz", (None, "default"))
    commands = play(c, [(200.0, GapsSeen(open_gaps, 0)), (300.0, GapsSeen(open_gaps, 0))])
    assert not [x for x in commands if isinstance(x, ReclaimNodes | TakeLeases)]
    commands = play(c, [(305.0, GapsSeen(open_gaps, 5))])
    assert sorted(taken(commands)) == ["ann", "bob"]


def test_idle_nodes_that_are_left_alone_are_known_while_they_are_idle():
    c = controller(rejected_s=300.0)
    play(c, [(0.0, job("j", 1, 2, owner="ann")), (1.0, gaps("a", "b"))])
    play(c, [(2.0, NodeJoined("a", owner="ann")), (10.0, NodeRejected("a"))])
    assert c.gaps.left_alone("ann", 20.0) == {}, "not seen as idle yet"
    play(c, [(20.0, gaps("a", "b"))])
    assert c.gaps.left_alone("ann", 30.0) == {"a": 280.0}
    assert c.gaps.left_alone("bob", 30.0) == {}, "of use to others"
    play(c, [(40.0, gaps("b"))])
    assert c.gaps.left_alone("ann", 40.0) == {}
    play(c, [(320.0, gaps("a", "b"))])
    assert c.gaps.left_alone("ann", 320.0) == {}
