"""The account of node-seconds on histories small enough to add up by hand, and its invariant on
any.
"""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from malletrain.demo.account import (
    Account,
    AssignmentSpan,
    DemoResult,
    JobResult,
    RoundSpan,
    account,
    both,
    length,
    machine_of,
    normal,
    render,
    without,
)
from malletrain.render.columns import console
from tests.draws import cases


def row(time, node, event, lease="", reason=""):
    return {"time": str(time), "node": node, "event": event, "lease": lease, "reason": reason}


def test_machine_of():
    rows = [
        row(0, "", "start"),
        row(5, "n1", "idle"),
        row(12, "n1", "leased", "l1"),
        row(30, "n1", "preempted", "l1", "preempted with notice"),
        row(33, "n1", "ended", "l1"),
        row(34, "n1", "busy"),
        row(50, "n1", "idle"),
        row(55, "n2", "idle"),
        row(60, "n1", "leased", "l2"),
        row(70, "n1", "preempted", "l2", "preempted without notice"),
        row(70.1, "n1", "ended", "l2"),
        row(99, "n3", "idle"),
    ]
    machine = machine_of(rows, 10, 80)
    assert machine.offered == {"n1": ((10, 30), (50, 70)), "n2": ((55, 80),)}
    assert machine.leased == {"n1": ((12, 33), (60, 70.1)), "n2": ()}
    assert [(m.node, m.time, m.notice) for m in machine.preemptions] == [
        ("n1", 30, True),
        ("n1", 70, False),
    ]


def test_given_back_is_still_offered():
    rows = [
        row(0, "n1", "idle"),
        row(1, "n1", "leased", "a"),
        row(5, "n1", "ended", "a"),
        row(6, "n1", "idle"),
        row(9, "n1", "busy"),
    ]
    machine = machine_of(rows, 0, 20)
    assert machine.offered == {"n1": ((0, 9),)}
    assert machine.leased == {"n1": ((1, 5),)}


def two_nodes():
    """n1 idle all the time, n2 taken at 50 (gone at 52): round 1 on both, round 2 on n1 alone."""
    return machine_of(
        [
            row(0, "n1", "idle"),
            row(0, "n2", "idle"),
            row(2, "n1", "leased", "a"),
            row(2, "n2", "leased", "b"),
            row(50, "n2", "preempted", "b", "preempted with notice"),
            row(52, "n2", "ended", "b"),
        ],
        0,
        100,
    )


def test_account_adds_up():
    rounds = [RoundSpan("j", 1, ("n1", "n2"), 10, 51), RoundSpan("j", 2, ("n1",), 55, 90)]
    assignments = [AssignmentSpan("n1", "j", (4, 95)), AssignmentSpan("n2", "j", (4, 50))]
    a = account(two_nodes(), rounds, assignments)
    assert a.offered == 100 + 50
    # The second of n2 after 50 belongs to the main scheduler.
    assert a.harvested == (51 - 10) + (50 - 10) + (90 - 55)
    assert a.lost_to_preemption == 55 - 51
    assert a.lost_to_rescaling == (10 - 4) * 2 + (95 - 90)
    assert a.leased_unused == 2 * 2 + 5
    assert a.not_leased == 2 * 2
    assert {s.kind for s in a.spans} == {"idle", "leased", "job", "pause"}


def test_growing_counts_the_warm_up_of_the_joiner():
    machine = machine_of(
        [row(0, n, "idle") for n in ("n1", "n2")] + [row(0, n, "leased", n) for n in ("n1", "n2")],
        0,
        40,
    )
    rounds = [RoundSpan("j", 1, ("n1",), 5, 20), RoundSpan("j", 2, ("n1", "n2"), 22, 40)]
    assignments = [AssignmentSpan("n1", "j", (0, 40)), AssignmentSpan("n2", "j", (12, 40))]
    a = account(machine, rounds, assignments)
    assert a.lost_to_rescaling == 5 + 2 + 10
    assert a.lost_to_preemption == 0
    assert a.leased_unused == 12


def test_preempted_to_nothing():
    """A job that is suspended because its node was taken: what it holds afterwards until it trains
    again is lost to preemption.
    """
    machine = machine_of(
        [
            row(0, "n1", "idle"),
            row(0, "n1", "leased", "a"),
            row(20, "n1", "preempted", "a", "preempted without notice"),
            row(20, "n1", "ended", "a"),
            row(30, "n1", "idle"),
            row(30, "n1", "leased", "b"),
        ],
        0,
        50,
    )
    rounds = [RoundSpan("j", 1, ("n1",), 1, 20), RoundSpan("j", 2, ("n1",), 36, 50)]
    a = account(
        machine, rounds, [AssignmentSpan("n1", "j", (0, 20)), AssignmentSpan("n1", "j", (30, 50))]
    )
    assert (a.lost_to_rescaling, a.lost_to_preemption, a.harvested) == (1, 6, 19 + 14)


NODES = ("n1", "n2", "n3")
TIMES = st.integers(0, 100).map(float)
PIECES = st.lists(st.tuples(TIMES, TIMES), max_size=6).map(normal)


@given(PIECES, PIECES)
def test_intervals(a, b):
    assert length(both(a, b)) + length(without(a, b)) == pytest.approx(length(a))
    assert both(without(a, b), b) == ()
    assert normal((*both(a, b), *without(a, b))) == a


@st.composite
def histories(draw):
    """Any story of three nodes and two jobs, also impossible ones."""
    rows = []
    for node in NODES:
        free, lease = False, None
        for k, moment in enumerate(sorted(draw(st.sets(TIMES, max_size=12)))):
            if not free:
                rows.append(row(moment, node, "idle"))
                free = True
            elif lease is None:
                lease = f"{node}-{k}"
                rows.append(row(moment, node, "leased", lease))
            else:
                why = draw(st.sampled_from(["preempted with notice", "preempted without notice"]))
                rows.append(row(moment, node, "preempted", lease, why))
                rows += [row(moment + 0.5, node, "ended", lease), row(moment + 0.5, node, "busy")]
                free, lease = False, None
    rows.sort(key=lambda r: float(r["time"]))
    rounds, assignments = [], []
    for job in ("a", "b"):
        moments = sorted(draw(st.lists(TIMES, max_size=8)))
        for k, (first, last) in enumerate(zip(moments[::2], moments[1::2], strict=False)):
            rounds.append(
                RoundSpan(job, k, tuple(draw(st.sets(st.sampled_from(NODES)))), first, last)
            )
        for _ in range(draw(st.integers(0, 4))):
            start, end = sorted((draw(TIMES), draw(TIMES)))
            assignments.append(AssignmentSpan(draw(st.sampled_from(NODES)), job, (start, end)))
    return rows, rounds, assignments


@settings(max_examples=cases(200), deadline=None)
@given(histories())
def test_nothing_is_lost_or_counted_twice(history):
    rows, rounds, assignments = history
    a = account(machine_of(rows, 10, 90), rounds, assignments)
    parts = (a.harvested, a.lost_to_rescaling, a.lost_to_preemption, a.leased_unused, a.not_leased)
    assert sum(parts) == pytest.approx(a.offered)
    assert min(parts) >= 0


GOOD = JobResult("a", "completed", 1000.0, 4, 0.95, 0.9528)


def result(*jobs, notes=()):
    return DemoResult(
        jobs, 12, 5, 2000.4, 130.04, Account(400.0, 200.0, 60.0, 40.0, 50.0, 50.0), notes
    )


def test_json_has_exactly_these_keys():
    data = result(GOOD).to_dict()
    assert list(data) == [
        "jobs",
        "rescales",
        "preemptions",
        "node_seconds_offered",
        "node_seconds_harvested",
        "samples",
        "wall_s",
    ]
    assert list(data["jobs"][0]) == [
        "name",
        "state",
        "samples",
        "rescales",
        "accuracy",
        "undisturbed_accuracy",
    ]
    assert (data["samples"], data["wall_s"]) == (2000, 130.0)


@pytest.mark.parametrize(
    ("accuracy", "undisturbed", "good"),
    [
        (0.95, 0.96, True),
        (0.97, 0.96, True),
        (0.95, 0.9611, False),
        (None, 0.9, False),
        (0.9, None, False),
    ],
)
def test_as_good(accuracy, undisturbed, good):
    assert JobResult("a", "completed", 0, 0, accuracy, undisturbed).as_good is good


def test_completed():
    assert result(GOOD).completed
    assert not result(GOOD, JobResult("b", "failed", 0, 0, None, None)).completed
    assert not result().completed


def test_tables():
    terminal = console(io.StringIO())
    terminal.print(
        render(
            result(GOOD, JobResult("b", "failed", 0, 0, None, 0.9), notes=("Mind this.",)),
            [("picture", "/x/t.png")],
        )
    )
    text = terminal.file.getvalue()
    for words in (
        "offered by the main scheduler",
        "400",
        "50 %",
        "15 %",
        "95.00 %",
        "95.28 %",
        "as good",
        "unknown",
    ):
        assert words in text
    for words in ("12 rescales and 5 preemptions", "Mind this.", "/x/t.png"):
        assert words in text
