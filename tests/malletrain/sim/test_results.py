"""The upper bound against trying everything."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from allocator import ScalingCurve
from malletrain.sim.results import IdealThroughput
from malletrain.sim.workloads import SimJob
from tests.malletrain.sim.conftest import job


def brute(jobs, idle):
    best = 0.0
    for sizes in product(*(range(j.max_nodes + 1) for j in jobs)):
        fits = all(
            k == 0 or (k >= j.min_nodes and (j.sizes is None or k in j.sizes))
            for j, k in zip(jobs, sizes, strict=True)
        )
        if sum(sizes) <= idle and fits:
            best = max(best, sum(j.curve.at(k) for j, k in zip(jobs, sizes, strict=True)))
    return best


def test_it_is_the_best_of_all_sizes():
    rng = np.random.default_rng(1)
    for _ in range(20):
        jobs = []
        for k in range(3):
            most = int(rng.integers(2, 6))
            curve = ScalingCurve.of({n: float(rng.integers(0, 50)) for n in range(1, most + 1)})
            sizes = (1, 2, 4) if rng.random() < 0.3 else None
            jobs.append(SimJob(f"j{k}", int(rng.integers(1, 3)), most, 1.0, curve, sizes=sizes))
        bound = IdealThroughput(9)
        table = bound.table(map(bound.kind, jobs))
        for idle in range(10):
            assert table[min(idle, len(table) - 1)] == pytest.approx(brute(jobs, idle))


def test_like_jobs_are_of_one_kind_and_no_job_is_worth_nothing():
    bound = IdealThroughput(8)
    assert bound.kind(job("a")) == bound.kind(job("b")) != bound.kind(job("c", rate=11.0))
    assert bound.table([]).tolist() == [0.0]
