"""Deadlines for the jobs of a simulation, drawn at random, and how many of them were held.

Decides how much slack a drawn deadline has. What a deadline means is the controller's decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from malletrain.sim.costs import SimRun
from malletrain.sim.workloads import SimJob, WorkloadError

SHORTEST_S = 600.0
"""Shorter jobs get no deadline: starts and the rhythm of plans are a large part of their time."""


def with_deadlines(
    jobs: Sequence[SimJob], share: float, slack: tuple[float, float] = (1.5, 5.0), seed: int = 0
) -> list[SimJob]:
    """The same jobs, a share of them with deadlines.

    A deadline is the time that the job needs on its largest size, undisturbed, times a factor drawn
    from ``slack`` (evenly in its logarithm), after its submission. Jobs that need less than
    :data:`SHORTEST_S` get none. Raises WorkloadError on a share or a slack that make no sense.
    """
    low, high = slack
    if not (0 <= share <= 1 and 1 <= low <= high):
        raise WorkloadError(
            f"Deadlines for a share of {share:g} of the jobs with {low:g} to {high:g} times the "
            "time they need cannot be drawn; give a share from 0 to 1 and factors from 1 on."
        )
    rng = np.random.default_rng((seed, 3))
    chosen = rng.random(len(jobs)) < share
    factors = np.exp(rng.uniform(np.log(low), np.log(high), len(jobs)))
    result = []
    for job, with_one, factor in zip(jobs, chosen.tolist(), factors.tolist(), strict=True):
        needs_s = job.samples / job.curve.at(job.max_nodes)
        if with_one and needs_s >= SHORTEST_S:
            job = replace(job, deadline_s=job.submit_s + factor * needs_s)
        result.append(job)
    return result


@dataclass(frozen=True)
class DeadlineCounts:
    """What came of the deadlines and budgets of a simulation."""

    deadlines: int
    """Those that came due while it was simulated."""
    met: int
    """Of these."""
    overspent: int
    """Jobs that held nodes for longer than their budget."""


def count_deadlines(runs: Iterable[SimRun], end_s: float) -> DeadlineCounts:
    """How many deadlines that came due by ``end_s`` were held, and which budgets were not."""
    every = list(runs)
    due = [r for r in every if r.job.deadline_s is not None and r.job.deadline_s <= end_s]
    met = [r for r in due if r.ended_at is not None and r.ended_at <= (r.job.deadline_s or 0.0)]
    over = [
        r
        for r in every
        if r.job.budget_nh is not None
        and sum(r.node_s.values()) > 3600.0 * r.job.budget_nh * (1 + 1e-6) + 1.0
    ]
    return DeadlineCounts(len(due), len(met), len(over))
