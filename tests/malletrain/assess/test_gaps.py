"""Counting gaps."""

from __future__ import annotations

import numpy as np
import pytest

from malletrain.assess.gaps import gap_report, typical_window
from malletrain.sim.workloads import WorkloadError
from scavenger.trace import synthesis
from scavenger.trace.trace import Trace
from tests.malletrain.sim.conftest import trace_of


def test_a_small_machine_by_hand():
    """Node a is idle for 30 s and for an hour, b from the middle to the end, c never."""
    trace = trace_of({"a": [(100, 130), (1000, 4600)], "b": [(5000, 10000)], "c": []}, 10000.0)
    g = gap_report(trace)
    assert (g.nodes, g.hours, g.gaps) == (3, 10000 / 3600, 2)
    assert g.idle_mean == pytest.approx((30 + 3600 + 5000) / 10000)
    assert (g.median_s, g.mean_s) == ((30 + 3600) / 2,) * 2
    assert {b.from_s: b.gaps for b in g.bins if b.gaps} == {0.0: 1, 3600.0: 2}
    assert sum(b.node_hours for b in g.bins) == pytest.approx(g.idle_node_hours)
    assert g.longer_than(600.0) == pytest.approx(8600 / 8630)
    assert g.to_dict()["histogram"][-1]["to_s"] is None


def test_the_curve_over_time_keeps_every_node_second():
    trace = synthesis.synthesise(synthesis.SUMMIT, 64, 7 * 3600.0, seed=3)
    g = gap_report(trace)
    assert np.mean([m for _, _, m, _ in g.over_time]) == pytest.approx(g.idle_mean)
    assert all(a <= m <= b for _, a, m, b in g.over_time)
    times, counts = trace.idle_count()
    inside = counts[times < trace.duration_s]
    assert max(b for *_, b in g.over_time) == inside.max()
    assert min(a for _, a, _, _ in g.over_time) == inside.min()


def test_a_machine_that_is_never_idle():
    g = gap_report(trace_of({"a": []}, 100.0))
    assert (g.idle_mean, g.gaps, g.median_s, g.longer_than(600.0)) == (0.0, 0, None, 0.0)
    with pytest.raises(WorkloadError, match="nothing to assess"):
        gap_report(Trace.validated([], [], [], [], 0.0))


def test_the_window_is_the_one_most_like_the_whole():
    """Idle half of the time: in the first three quarters never, then always, then half."""
    hours = 3600.0
    trace = trace_of({"a": [(10 * hours, 20 * hours)], "b": [(15 * hours, 25 * hours)]}, 40 * hours)
    begin, end = typical_window(trace, 4.0)
    mean = sum(
        max(0.0, min(end, b) - max(begin, a))
        for a, b in ((10 * hours, 20 * hours), (15 * hours, 25 * hours))
    ) / (end - begin)
    assert end - begin == 4 * hours
    assert mean == pytest.approx(0.5, abs=0.26)
    assert typical_window(trace, 50.0) == (0.0, 40 * hours)
