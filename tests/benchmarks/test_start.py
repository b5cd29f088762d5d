"""The times of jobs, and what is compared with what."""

from __future__ import annotations

import pytest

from benchmarks.start import compared, figures, summary
from malletrain.sim.model_jobs import CostModel, SimRun
from tests.malletrain.sim.conftest import job

HOUR_S = 3600.0


def run(name, submit_h, start_h=None, end_h=None, allocated_h=0.0):
    one = SimRun(job(name, submit_s=submit_h * HOUR_S), [0.0, 10.0], CostModel())
    one.first_start = None if start_h is None else start_h * HOUR_S
    one.ended_at = None if end_h is None else end_h * HOUR_S
    one.allocated_s = allocated_h * HOUR_S
    return one


def test_times_of_jobs_that_ended_and_of_others():
    """The first job waits an hour and once more for two hours; the second runs when the simulation
    ends, after ten hours; the third never started.
    """
    runs = [run("a", 0, 1, 8, 5), run("b", 2, 2, None, 8), run("c", 6)]
    times = figures(runs, 10 * HOUR_S)
    assert (times["count"], times["unfinished"]) == (3, 2)
    assert times["queued"] == pytest.approx((1 + 0 + 4) / 3)
    assert times["without_nodes"] == pytest.approx((3 + 0 + 4) / 3)
    assert times["completion"] == pytest.approx((8 + 8 + 4) / 3)


def row(policy, seed, queued, completion):
    world = {"machine": "kth", "jobs": "philly", "load": 0.7, "seed": seed}
    times = {"queued": queued, "without_nodes": 2 * queued, "completion": completion}
    return {**world, "policy": policy, "count": 10, "unfinished": 1, **times}


def test_ratios_are_within_one_seed():
    rows = [
        row("gang", 0, 10.0, 20.0),
        row("additive", 0, 1.0, 10.0),
        row("malletrain", 0, 2.0, 5.0),
        row("gang", 1, 5.0, 10.0),
        row("additive", 1, 1.0, 4.0),
        row("malletrain", 1, 2.0, 3.0),
    ]
    means = {one["policy"]: one for one in summary(compared(rows))}
    assert means["malletrain"]["over_gang"] == [0.3, 0.2, 0.4]
    assert means["malletrain"]["over_additive"] == [0.625, 0.5, 0.75]
    assert means["malletrain"]["queued"] == 2.0
    assert means["gang"]["over_gang"] == [1.0, 1.0, 1.0]
    assert means["malletrain"]["count"] == 20


def test_without_a_queue_there_is_no_ratio():
    rows = [row("gang", 0, 0.0, 20.0), row("additive", 0, 0.0, 10.0)]
    assert all(one["over_gang"] == [] for one in summary(compared(rows)))
