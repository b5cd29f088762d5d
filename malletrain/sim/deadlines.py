"""Random deadlines for the jobs of a simulation, and the numbers of deadlines and budgets that were
met.

Decides the slack of a random deadline. The controller decides how deadlines affect plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from malletrain.sim.model_jobs import SimRun
from malletrain.sim.workloads import SimJob, WorkloadError

SHORTEST_S = 600.0
"""Shorter jobs get no deadline, because starts and the interval between plans are a large part of
their time.
"""
_MAX_CHARGE_FACTOR, _MAX_EXCESS_S = 1 + 1e-6, 1.0
"""A job exceeds its budget if its charge is above the first times the budget plus the second,
node-seconds: sums of times are rounded.
"""


def with_deadlines(
    jobs: Sequence[SimJob], fraction: float, slack: tuple[float, float] = (1.5, 5.0), seed: int = 0
) -> list[SimJob]:
    """Return the jobs, a fraction of them with deadlines.

    The time from submission to deadline is the time that the job needs at its largest size without
    interruption, times a random factor. Jobs that need less than :data:`SHORTEST_S` get no
    deadline.

    Args:
        jobs: jobs of the workload.
        fraction: fraction of the jobs with deadlines, 0 to 1.
        slack: minimum and maximum of the factor, both at least 1. The factor is log-uniformly
            distributed.
        seed: seed of the random numbers.

    Raises:
        WorkloadError: the fraction or the slack is not valid.
    """
    low, high = slack
    if not (0 <= fraction <= 1 and 1 <= low <= high):
        raise WorkloadError(
            "Random deadlines need a fraction from 0 to 1 and factors of 1 or more, the smaller "
            f"first; got fraction {fraction:g}, factors {low:g} to {high:g}."
        )
    # other random numbers than those of the workload (1) and of the reports (2)
    rng = np.random.default_rng((seed, 3))
    chosen = rng.random(len(jobs)) < fraction
    factors = np.exp(rng.uniform(np.log(low), np.log(high), len(jobs)))
    result = []
    for job, gets_deadline, factor in zip(jobs, chosen.tolist(), factors.tolist(), strict=True):
        needs_s = job.samples / job.curve.at(job.max_nodes)
        if gets_deadline and needs_s >= SHORTEST_S:
            job = replace(job, deadline_s=job.submit_s + factor * needs_s)
        result.append(job)
    return result


@dataclass(frozen=True)
class GoalCounts:
    """Numbers of deadlines and budgets that a simulation met and missed."""

    deadlines: int
    """Number of deadlines within the simulated time."""
    met: int
    """Number of these that were met."""
    overspent: int
    """Number of jobs that exceeded their budget."""


def count_goals(
    runs: Iterable[SimRun], end_s: float, prices: Mapping[str, float] | None = None
) -> GoalCounts:
    """Count the deadlines up to ``end_s``, those that were met, and the exceeded budgets.

    Args:
        runs: all jobs.
        end_s: end of the simulation, seconds.
        prices: kind of slots → node-seconds that a second of one counts; others count 1.
    """
    price = (prices or {}).get
    all_runs = list(runs)
    due = [r for r in all_runs if r.job.deadline_s is not None and r.job.deadline_s <= end_s]
    met = [r for r in due if r.ended_at is not None and r.ended_at <= (r.job.deadline_s or 0.0)]
    overspent = [
        r
        for r in all_runs
        if r.job.budget_nh is not None
        and sum(price(kind, 1.0) * use.allocated_s for kind, use in r.use.items())
        > _MAX_CHARGE_FACTOR * 3600.0 * r.job.budget_nh + _MAX_EXCESS_S
    ]
    return GoalCounts(len(due), len(met), len(overspent))
