"""The changes of nodes that the model of the cache and a real pool are replayed with."""

from __future__ import annotations

import pytest

from benchmarks.infinicache_pool import SETTLE_S, NodeChange, node_changes
from scavenger.trace.trace import Trace


def trace(*gaps, duration=100.0):
    """A trace of (node, idle from, idle until)."""
    names = sorted({name for name, _, _ in gaps})
    node, begins, ends = zip(*((names.index(n), a, b) for n, a, b in gaps), strict=True)
    return Trace.from_gaps(node, begins, ends, names, duration)


BEGIN, LENGTH = 20.0, 30.0


@pytest.mark.parametrize(
    ("gaps", "since", "changes"),
    [
        # Idle at the begin, in the order in which they became it; what was idle before is not.
        ([("b", 3, 90), ("a", 5, 90), ("c", 1, 9)], {"b": -17.0, "a": -15.0}, []),
        ([("a", 25, 90)], {}, [(5.0, True, ["a"])]),
        ([("a", 25, 35)], {}, [(5.0, True, ["a"]), (16.0, False, ["a"])]),
        # Departures within a second of the first are one, later ones another.
        (
            [("a", 1, 30), ("b", 2, 30.5), ("c", 3, 31), ("d", 4, 31.5)],
            {"a": -19.0, "b": -18.0, "c": -17.0, "d": -16.0},
            [(11.0, False, ["a", "b", "c"]), (12.5, False, ["d"])],
        ),
        # In order of time, although the departure counts a second later.
        (
            [("a", 1, 30), ("b", 30.5, 90)],
            {"a": -19.0},
            [(10.5, True, ["b"]), (11.0, False, ["a"])],
        ),
        # The last departure of the part counts, at its end at the latest.
        ([("a", 1, 48)], {"a": -19.0}, [(29.0, False, ["a"])]),
        ([("a", 1, 49.75)], {"a": -19.0}, [(30.0, False, ["a"])]),
        ([("a", 1, 50.25)], {"a": -19.0}, []),
    ],
)
def test_the_changes_of_a_part_of_a_trace(gaps, since, changes):
    idle_since, later = node_changes(trace(*gaps), BEGIN, LENGTH)
    assert SETTLE_S == 1.0
    assert list(idle_since.items()) == list(since.items())
    assert later == [NodeChange(*change) for change in changes]


def test_each_change_before_the_part_is_passed_on():
    calls = []
    node_changes(
        trace(("a", 5, 15), ("b", 10, 30)),
        BEGIN,
        LENGTH,
        lambda idle_since, at: calls.append((at, dict(idle_since))),
    )
    assert calls == [(-15.0, {"a": -15.0}), (-10.0, {"a": -15.0, "b": -10.0}), (-5.0, {"b": -10.0})]
