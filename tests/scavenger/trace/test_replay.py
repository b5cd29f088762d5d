"""Replay: changes come in order and add up to the trace's state, at every end; nodes chosen are
active and different.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.trace.replay import Replay, active_nodes, busiest_start, fit
from scavenger.trace.synthesis import SUMMIT, demo_trace, synthesise
from scavenger.trace.trace import Trace, TraceError
from tests.draws import cases

TRACE = Trace.from_gaps([0, 0, 1], [0.0, 6.0, 2.0], [4.0, 10.0, 8.0], ["a", "b"], 10.0)


def rows(changes):
    return [(c.time, c.node, c.idle) for c in changes]


def test_changes_are_told_once_and_in_order():
    replay = Replay(TRACE, "hold")
    assert rows(replay.advance(0.0)) == [(0.0, "a", True)]
    assert rows(replay.advance(1.0)) == []
    assert rows(replay.advance(6.0)) == [(2.0, "b", True), (4.0, "a", False), (6.0, "a", True)]
    assert replay.idle.tolist() == [True, True]
    with pytest.raises(ValueError, match="goes back"):
        replay.advance(5.0)


@pytest.mark.parametrize(
    ("end", "at_end", "idle"),
    [
        ("hold", [(8.0, "b", False)], [True, False]),
        ("idle", [(8.0, "b", False), (10.0, "b", True)], [True, True]),
        ("busy", [(8.0, "b", False), (10.0, "a", False)], [False, False]),
        # Node a is idle at the end and at the beginning: nothing changes for it.
        ("repeat", [(8.0, "b", False)], [True, False]),
    ],
)
def test_the_end_of_the_trace(end, at_end, idle):
    replay = Replay(TRACE, end)
    replay.advance(7.0)
    assert rows(replay.advance(11.0)) == at_end
    assert replay.idle.tolist() == idle


def test_a_repeated_trace_has_the_state_of_its_first_round():
    replay = Replay(TRACE, "repeat")
    for t in np.arange(0.0, 35.0, 0.5):
        replay.advance(float(t))
        assert replay.idle.tolist() == TRACE.idle_at(float(t) % 10.0).tolist()


@given(
    steps=st.lists(st.floats(0.0, 7.0), max_size=20),
    end=st.sampled_from(["repeat", "idle", "busy", "hold"]),
)
@settings(max_examples=cases(80), deadline=None)
def test_big_and_small_steps_tell_the_same(steps, end):
    small, time, pieces = Replay(TRACE, end), 0.0, []
    for step in steps:
        time += step
        pieces += rows(small.advance(time))
    assert pieces == rows(Replay(TRACE, end).advance(time)) if steps else pieces == []


def test_bad_settings_are_refused():
    with pytest.raises(TraceError, match="must be one of repeat, idle, busy, hold"):
        Replay(TRACE, "never")
    with pytest.raises(TraceError, match="lasts 0 s"):
        Replay(Trace.from_gaps([], [], [], ["a"], 0.0))
    with pytest.raises(TraceError, match="fewer than the 3 wanted"):
        fit(TRACE, ["x", "y", "z"])
    with pytest.raises(TraceError, match="holds no event"):
        fit(Trace.from_gaps([], [], [], ["a"], 5.0), ["x"])
    with pytest.raises(TraceError, match="positive number"):
        fit(TRACE, ["x"], speedup=0.0)


def test_a_trace_of_the_same_nodes_keeps_them():
    fitted = fit(TRACE, ["b", "a"], speedup=2.0)
    assert (fitted.names, fitted.duration_s) == (("b", "a"), 5.0)
    assert fitted.idle_at(0.5).tolist() == [False, True]


def test_a_big_trace_is_cut_to_active_nodes_that_differ():
    big = synthesise(SUMMIT, 800, 86400.0, seed=1)
    names = [f"n{k}" for k in range(1, 7)]
    fitted = fit(big, names, speedup=60.0, duration_s=120.0)
    assert (fitted.names, fitted.duration_s) == (tuple(names), 120.0)
    assert fitted.statistics().idle_mean > 1.0
    states = np.stack([fitted.idle_at(float(t)) for t in range(120)])
    assert len({tuple(column) for column in states.T}) == 6
    assert len(fitted.batch_edges()) > 6
    assert (
        fit(big, names, speedup=60.0, duration_s=120.0, seed=0).node.tolist()
        == fitted.node.tolist()
    )
    late = fit(big, names, speedup=60.0, duration_s=120.0, start_s=50_000.0)
    assert late.time.tolist() != fitted.time.tolist()


def test_the_busiest_window_is_where_most_gaps_begin_at_different_times():
    node, start = list(range(10)), [1.0, 1, 1, 1, 1, 50, 52, 54, 90, 91]
    trace = Trace.from_gaps(node, start, [s + 5 for s in start], [f"m{k}" for k in node], 100.0)
    assert busiest_start(trace, 10.0) == 50.0
    assert busiest_start(trace, 200.0) == 0.0
    assert busiest_start(trace, 10.0, useful_s=6.0) == 0.0


def test_nodes_without_activity_are_taken_last():
    trace = Trace.from_gaps(
        [1, 3, 3], [1.0, 2.0, 6.0], [4.0, 3.0, 9.0], [f"m{k}" for k in range(5)], 10.0
    )
    assert set(active_nodes(trace, 2)) == {1, 3}
    assert len(set(active_nodes(trace, 5))) == 5


@pytest.mark.parametrize("seed", range(5))
def test_the_demo_trace_is_lively(seed):
    trace = demo_trace(6, 120.0, 30.0, seed)
    fitted = fit(trace, list(trace.names), speedup=30.0)
    assert fitted.duration_s == 120.0
    inside = fitted.time > 0
    assert (fitted.idle & inside).sum() >= 6
    assert (~fitted.idle & inside).sum() >= 6
    assert fitted.statistics().idle_mean == pytest.approx(3.5, rel=0.11)
    assert fitted.idle_at(0.0).sum() >= 2
    complete = fitted.gaps()
    assert complete.length[complete.complete].min() >= 7.999
