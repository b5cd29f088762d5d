"""Who is admitted, who starves, and whose minimum is guaranteed next."""

from __future__ import annotations

import pytest

from allocator import RescaleCost, ScalingCurve
from malletrain.core.commands import Start, Suspend, TakeLeases
from malletrain.core.events import (
    CurveChanged,
    JobCancelled,
    JobCompleted,
    JobState,
    NodeJoined,
    NodeLost,
    RescaleFinished,
    Tick,
)
from malletrain.core.gaps import Gaps
from malletrain.core.planning import Candidate
from malletrain.core.pools import Pool
from malletrain.core.queueing import AdmissionQueue
from malletrain.core.state import ControllerState
from tests.malletrain.core.controller_script import (
    controller,
    gaps,
    job,
    nodes,
    play,
    running,
)


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
    commands = play(
        c, [(2.0, RescaleFinished("narrow")), *nodes("b", "c", at=10.0), (11.0, Tick())]
    )
    assert commands == [Suspend("narrow"), Start("wide", ("a", "b", "c"))]


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


def test_who_had_nodes_before_waits_so_many_times_as_long_for_a_turn():
    c = controller(starvation_s=100.0, turns_apart=6.0)
    play(
        c,
        [
            (0.0, job("rich", 2, 2, weight=100.0)),
            (0.0, job("poor", 2, 2)),
            *nodes("a", "b"),
            (1.0, Tick()),
        ],
    )
    play(c, [(5.0, RescaleFinished("rich"))])
    assert play(c, [(100.5, Tick())]) == [Suspend("rich"), Start("poor", ("a", "b"))]
    play(c, [(101.0, RescaleFinished("poor")), (199.0, Tick(), [])])
    assert c.next_wakeup() == 200.0, "its turn is over, and its nodes are worth more elsewhere"
    assert play(c, [(200.5, Tick())]) == [Suspend("poor"), Start("rich", ("a", "b"))]
    play(c, [(201.0, RescaleFinished("rich")), (301.0, Tick(), []), (799.0, Tick(), [])])
    assert c.next_wakeup() == 800.0
    assert play(c, [(800.5, Tick())]) == [Suspend("rich"), Start("poor", ("a", "b"))]


@pytest.mark.parametrize(("had_s", "wait_s"), [(1.0, 105.0), (50.0, 350.0), (99.0, 595.0)])
def test_who_had_only_a_part_of_its_turn_waits_less_for_the_next(had_s, wait_s):
    c = controller(starvation_s=100.0, turns_apart=6.0)
    rich, poor = job("rich", 2, 2, weight=100.0), job("poor", 2, 2)
    play(c, [(0.0, rich), (0.0, poor), *nodes("a", "b"), (1.0, Tick())])
    play(c, [(5.0, RescaleFinished("rich"))])
    assert Start("poor", ("a", "b")) in play(c, [(100.0, Tick())])
    over = 100.0 + had_s
    lost = over - c.settings.idle_debounce_s
    play(c, [(100.0, RescaleFinished("poor")), (lost, NodeLost("a")), (lost, NodeLost("b"))])
    assert play(c, [(over + 0.1, Tick())]) == [Suspend("poor")]
    play(c, [(over + 1.0, NodeJoined("a")), (over + 1.0, NodeJoined("b"))])
    assert play(c, [(over + 2.0, Tick())]) == [Start("rich", ("a", "b"))]
    play(c, [(over + 3.0, RescaleFinished("rich")), (over + wait_s - 1.0, Tick(), [])])
    assert c.next_wakeup() == pytest.approx(over + wait_s)
    assert Start("poor", ("a", "b")) in play(c, [(over + wait_s + 0.1, Tick())])


def test_who_gets_nodes_by_turns_only_does_not_wait_longer_for_the_next():
    c = controller(starvation_s=100.0, turns_apart=6.0, release_after_s=1e6)
    idle = [(0.0, job("a", 2, 2)), *nodes("a", "b"), (1.0, Tick()), (5.0, RescaleFinished("a"))]
    play(c, idle)
    dear = RescaleCost(start_s=c.settings.planning.t_fwd_s)
    play(c, [(10.0, CurveChanged("a", ScalingCurve.of({2: 1.0}), dear)), (20.0, NodeLost("a"))])
    play(c, [(30.0, NodeJoined("a")), (119.0, Tick())])
    assert not c.jobs["a"].nodes, "a start does not pay for itself"
    assert Start("a", ("a", "b")) in play(c, [(123.0, Tick())])


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
    commands = play(c, [(205.0, RescaleFinished("small")), (251.0, Tick())])
    assert [type(x) for x in commands] == [Suspend, Suspend, Start]
    assert commands[-1].job == "wide"


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


# --- the queue by itself ---


def queue(*jobs, max_running=2, starvation_s=100.0):
    state = ControllerState()
    for spec in jobs:
        state.submit(spec)
    gaps = Gaps()
    return state, gaps, AdmissionQueue(state, gaps, max_running, starvation_s)


def test_nodes_beyond_what_every_job_fits_on_have_the_queue_looked_through_no_more():
    state, _, jobs = queue(job("a", 1, 9), job("wide", 3, 9), job("b", 2, 9), max_running=9)
    admitted_by_count = {
        count: jobs.admitted({"default": count}, shared=True) for count in range(1, 1000)
    }
    names = {
        count: [one.submitted.job for one in admitted_by_count[count]] for count in (1, 2, 3, 999)
    }
    assert names == {1: ["a"], 2: ["a", "b"], 3: ["a", "wide", "b"], 999: ["a", "wide", "b"]}
    assert len({id(one) for one in admitted_by_count.values()}) == 3
    state.submit(job("wider", 5, 9))
    assert [len(jobs.admitted({"default": count}, shared=True)) for count in (4, 5, 6)] == [3, 4, 4]


@pytest.mark.parametrize(
    ("free", "shared", "names"),
    [
        ({"default": 4}, True, ["a0", "b0"]),
        ({"default": 1}, True, ["a1", "b0"]),
        ({Pool("default", "alice"): 4, Pool("default", "bob"): 1}, False, ["a0", "b0"]),
        ({Pool("default", "alice"): 4}, False, ["a0", "a1"]),
        ({Pool("default", "alice"): 1}, False, ["a1"]),
        ({}, True, []),
    ],
)
def test_admitted_are_those_that_fit_the_first_of_each_owner_first(free, shared, names):
    _, _, q = queue(
        job("a0", 2, 4, owner="alice"),
        job("a1", 1, 4, owner="alice"),
        job("b0", 1, 1, owner="bob"),
        max_running=2,
    )
    assert [j.submitted.job for j in q.admitted(free, shared=shared)] == names


def test_who_is_admitted_follows_what_comes_and_ends():
    state, _, q = queue(job("a"), job("b"), max_running=1)
    assert [j.submitted.job for j in q.admitted({"default": 1}, shared=True)] == ["a"]
    state.end("a", JobState.COMPLETED, 1.0)
    assert [j.submitted.job for j in q.admitted({"default": 1}, shared=True)] == ["b"]


def test_a_job_starves_when_it_has_waited_and_a_wake_up_is_asked_for():
    state, _, q = queue(job("a"))
    state.node_joined(NodeJoined("n0"), 0.0)
    q.notice(5.0)
    assert q.wakeups() == [105.0]
    q.notice(104.9)
    assert not state.jobs["a"].starving
    q.notice(105.0)
    assert (state.jobs["a"].starving, state.plan_at, q.wakeups()) == (True, 105.0, [])


def test_nobody_is_ahead_of_one_of_another_owner_for_whom_nodes_are_gathered():
    _, gaps, q = queue(job("a", owner="alice"), job("b", owner="bob"))
    gaps.seen({"n0": (None, "default")}, 0.0)
    q.notice(0.0)
    q.notice(200.0)
    b = Candidate("b", 1, 4, ())
    assert q.starving({"b": b}, 200.0) == [], "alice waits for longer"
    for now in (200.0, 202.0):  # her leases come to nothing
        gaps.ask({Pool("default", "alice"): 1}, gaps.open((), ("alice",), now), now)
        gaps.refused("n0", "alice", now)
        gaps.seen({"n0": (None, "default")}, now)
    assert gaps.backing_off("alice", 203.0)
    assert q.starving({"b": b}, 203.0) == [b]
