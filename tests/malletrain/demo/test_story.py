"""From events and looks at sample counts to holdings, rounds and throughput."""

import pytest

from malletrain.demo.account import AssignmentSpan, RoundSpan, assignments_of, rounds_of, throughput
from malletrain.protocol.views import EventView, RescaleView
from tests.malletrain.cli.fake_daemon import detail, job_view


def event(time, kind, job="j1", node="", **data):
    return EventView(
        seq=int(time * 10),
        time=time,
        kind=kind,
        job=job,
        node=node,
        lease="",
        sentence="",
        data=data,
    )


def test_held():
    events = [
        event(1, "job-started", nodes=["n1", "n2"]),
        event(5, "job-rescaled", nodes=["n2", "n3"]),
        event(6, "job-started", job="j2", nodes=["n1"]),
        event(7, "node-lost", node="n3"),
        event(9, "job-suspended"),
        event(12, "job-started", nodes=["n2"]),
        event(20, "job-completed"),
    ]
    assignments = assignments_of(events, 30.0, {"j1": "a", "j2": "b"})
    assert sorted(assignments, key=lambda h: (h.interval, h.node)) == [
        AssignmentSpan("n1", "a", (1, 5)),
        AssignmentSpan("n2", "a", (1, 9)),
        AssignmentSpan("n3", "a", (5, 7)),
        AssignmentSpan("n1", "b", (6, 30.0)),
        AssignmentSpan("n2", "a", (12, 20)),
    ]


def rescale(generation, ended, cost):
    return RescaleView(
        generation=generation,
        kind="up",
        from_nodes=1,
        to_nodes=2,
        began=0.0,
        cost_s=cost,
        ended=ended,
    )


def of(*rescales):
    return [detail(job=job_view(name="a"), rescales=rescales)]


def test_rounds():
    events = [
        event(1, "round-formed", generation=1, members=["n1"]),
        event(10, "round-formed", generation=2, members=["n1", "n2"]),
        event(20, "round-formed", generation=3, members=["n1"]),
        event(30, "job-completed"),
    ]
    assert rounds_of(
        events, of(rescale(1, 3.0, 2.0), rescale(2, 13.0, 4.0), rescale(3, 22.5, 2.5)), {}, 40.0
    ) == [
        RoundSpan("a", 1, ("n1",), 3.0, 9.0),
        RoundSpan("a", 2, ("n1", "n2"), 13.0, 20.0),
        RoundSpan("a", 3, ("n1",), 22.5, 30),
    ]


def test_a_round_that_never_processed_a_sample_is_none():
    events = [
        event(1, "round-formed", generation=1, members=["n1"]),
        event(4, "round-formed", generation=2, members=["n2"]),
    ]
    rounds = rounds_of(events, of(rescale(2, 6.0, 5.0)), {}, 10.0)
    assert rounds == [RoundSpan("a", 2, ("n2",), 6.0, 10.0)]


def test_a_round_that_comes_to_nothing_ends_the_one_before():
    events = [
        event(1, "round-formed", generation=1, members=["n1"]),
        event(7, "round-formed", generation=2, members=["n1", "n2"]),
        event(9, "job-completed"),
    ]
    assert rounds_of(events, of(rescale(1, 2.0, 1.0)), {}, 9.0) == [
        RoundSpan("a", 1, ("n1",), 2.0, 7)
    ]


def test_suspension_ends_a_round():
    events = [
        event(1, "round-formed", generation=1, members=["n1"]),
        event(5, "job-suspended"),
        event(8, "round-formed", generation=2, members=["n1"]),
    ]
    rounds = rounds_of(events, of(rescale(1, 2.0, 1.0), rescale(2, 9.0, 2.0)), {}, 20.0)
    assert [(r.first, r.last) for r in rounds] == [(2.0, 5.0), (9.0, 20.0)]


def test_first_sample_while_the_daemon_was_away():
    events = [
        event(1, "round-formed", generation=1, members=["n1"]),
        event(10, "round-formed", generation=2, members=["n1", "n2"]),
    ]
    counts = {"a": [(9.9, 100.0), (10.5, 120.0), (11.0, 120.0), (18.0, 300.0), (18.5, 320.0)]}
    rounds = rounds_of(events, of(rescale(1, 3.0, 2.0)), counts, 20.0)
    assert [(r.generation, r.first, r.last) for r in rounds] == [(1, 3.0, 10.0), (2, 18.0, 20.0)]


def test_throughput():
    looks = [
        (0.0, 0.0),
        (1.0, 100.0),
        (2.0, 200.0),
        (3.0, 200.0),
        (4.0, 200.0),
        (4.0, 200.0),
        (5.0, 150.0),
        (8.0, 600.0),
    ]
    series = throughput("a", looks)
    assert series.times == tuple(t for t, _ in looks)
    assert series.rates == pytest.approx(
        (100.0, 100.0, 50.0, 0.0, 0.0, 0.0, 400 / 3, 0.0)
    )  # never below 0


def test_throughput_while_the_daemon_is_away():
    """Training goes on at 100/s; the daemon knows less at first when it is back."""
    looks = [(0.0, 0.0), (1.0, 100.0), (6.0, 80.0), (6.5, 80.0), (8.0, 800.0), (9.0, 900.0)]
    series = throughput("a", looks, unknown=[(1.5, 7.0)])
    assert series.times == (0.0, 1.0, 8.0, 9.0)
    assert series.rates == pytest.approx((100.0, 100.0, 100.0, 0.0))


def test_throughput_of_nothing():
    assert throughput("a", []).rates == ()
    assert throughput("a", [(1.0, 5.0)]).rates == (0.0,)
