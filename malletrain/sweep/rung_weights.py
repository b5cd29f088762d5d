"""The weight of each trial's job in the plan: trials on higher rungs weigh more. Pure.

The pruner and the allocator meet in the bid. The trials on the highest rung have the weight that
the sweep has; the others have less. When only those on the highest rung remain, they have the whole
weight and get the nodes that there are. :mod:`malletrain.core.bidders` makes all trials together
count as one job of that weight beside other jobs.

The weights are close to each other, because a node brings most to a trial that has none: a second
node for a running trial brings about 0.87 as much (2^0.9 - 1, with throughput taken as nodes^0.9
until it is measured). No trial weighs less than 0.88 of another, so that many trials start small
before one grows, and the remaining nodes go to the most promising ones. A factor of 2 per rung
would let one trial grow while others wait, which trains less on the same nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

WEIGHT_PER_RUNG = 1.02
"""Ratio of the weights of two trials that are one rung apart."""
MAX_RUNGS_BELOW = 6
"""A trial further below the highest rung weighs as much as one this far below it."""


def rung(step: int | None, first: int, reduction: int) -> int:
    """The rung of a trial: how many rungs it has passed.

    Args:
        step: the last step that the trial reported; None if it reported none.
        first: step of the first rung.
        reduction: factor between the steps of two rungs.
    """
    passed, at = 0, first
    while step is not None and step >= at:
        passed, at = passed + 1, at * reduction
    return passed


def weights(rungs: Mapping[int, int], highest: float) -> dict[int, float]:
    """The weight of each trial's job.

    Args:
        rungs: trial → its rung.
        highest: the weight of the trials on the highest rung.
    """
    top = max(rungs.values(), default=0)
    return {
        trial: highest * WEIGHT_PER_RUNG ** -min(top - rung_, MAX_RUNGS_BELOW)
        for trial, rung_ in rungs.items()
    }
