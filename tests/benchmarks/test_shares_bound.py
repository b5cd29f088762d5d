"""The bound of what deadlines and shares leave, against what can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from allocator import ScalingCurve
from benchmarks.shares_bound import most_samples
from malletrain.sim.workloads import SimJob

HOUR = 3600.0
QUICK, SLOW = ScalingCurve.of({1: 10.0, 2: 15.0}), ScalingCurve.of({1: 1.0, 2: 2.0})


def work(name, curve, hours, **more):
    return SimJob(
        name, 1, 2, curve.at(1) * hours * HOUR, curve, stated_curve=curve, model=name, **more
    )


IDLE = np.array([1.0, 1.0, 2.0])
JOBS = [
    work("quick", QUICK, 9.0, user="ann"),
    work("slow", SLOW, 1.5, user="bob", deadline_s=2 * HOUR),
]


def test_without_wishes_the_quick_job_has_all_nodes():
    assert most_samples(JOBS, IDLE, HOUR) == pytest.approx((10 + 10 + 15) * HOUR, rel=1e-6)


def test_a_deadline_takes_the_nodes_it_needs_before_it():
    samples = most_samples(JOBS, IDLE, HOUR, served_deadlines={"slow"})
    assert samples == pytest.approx((0.5 * 10 + 15 + 1.5) * HOUR, rel=1e-6)


def test_shares_are_kept_where_that_costs_least():
    # A fifth of four node-hours: in the last hour, when a second node brings the quick job half.
    samples = most_samples(JOBS, IDLE, HOUR, parts={"ann": 0.2, "bob": 0.2}, off=0.0)
    assert samples == pytest.approx((10 + 10 + 10 + 0.2 * 5 + 0.8) * HOUR, rel=1e-6)


def test_what_cannot_be_kept_is_said():
    late = [JOBS[0], replace(JOBS[1], samples=9 * HOUR)]
    with pytest.raises(ValueError, match="cannot be kept together"):
        most_samples(late, IDLE, HOUR, served_deadlines={"slow"})
