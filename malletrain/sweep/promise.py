"""How much each trial's job counts in the plan: trials that have come further up the rungs count
more. Pure.

The pruner and the allocator meet in the bid. The most promising trial has the weight that the
sweep was given, the others less; when only the last are left, they have that weight and take what
there is. That all together count beside other jobs as one job of that weight is the controller's
business (:mod:`malletrain.core.sweep_bids`).

The weights are close to each other. A node does most for a trial that has none: another one for a
trial that runs brings about 0.87 as much (throughput goes with nodes^0.9 as long as nothing was
measured). So no trial counts less than 0.88 of another, that many begin small before one grows, and
what is left over goes to those of most promise. Counting each rung double, as was done at first,
let one trial grow beside others that waited: less was trained on the same nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

PER_RUNG = 1.02
"""A trial one rung higher counts so many times as much."""
MOST_RUNGS = 6
"""Rungs below the highest at which a trial counts no less than one more above it."""


def rung(step: int | None, first: int, reduction: int) -> int:
    """How many rungs a trial has passed that has come to ``step``: they are at ``first``, ``first ·
    reduction``, ``first · reduction²``, …
    """
    passed, at = 0, first
    while step is not None and step >= at:
        passed, at = passed + 1, at * reduction
    return passed


def weights(rungs: Mapping[int, int], highest: float) -> dict[int, float]:
    """The weight of each trial's job.

    Args:
        rungs: by trial.
        highest: the weight of those on the highest rung.
    """
    top = max(rungs.values(), default=0)
    return {
        trial: highest * PER_RUNG ** -min(top - each, MOST_RUNGS) for trial, each in rungs.items()
    }
