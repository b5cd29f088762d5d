"""Which deadlines are held together, where the nodes do not suffice for all. Pure.

Decides whose deadline counts. Served in the order of their deadlines, jobs can all be held if by
each of these moments no more node-time is needed than there will have been. Where it is not so, the
job that needs most is given up, which gives up the fewest (Moore, Management Science 15(1), 1968).
A job that was promised before is given up less easily: who changes its mind holds nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from malletrain.core.forecast import Floats, like_now
from malletrain.core.node_history import SPAN_S

KEPT = 0.6
"""What a job that was promised before needs counts so much when one has to be given up."""
SURE = 0.3
"""In so large a part of the past there was less node-time than is counted on."""


@dataclass(frozen=True)
class Demand:
    """What one deadline needs."""

    job: str
    within_s: float
    """Seconds to the deadline."""
    node_s: float
    """Node-seconds until the job is done."""
    before: bool = False
    """It was promised at the last look."""


def node_time(past: Floats, nodes: float, within_s: Sequence[float]) -> Floats:
    """Node-seconds that there will be within each of these times, counted carefully.

    Args:
        past: nodes there were, a span each; it is taken to come again and again.
        nodes: how many there are now.
        within_s: seconds from now.
    """
    starts = like_now(past, nodes)
    lengths = np.asarray(within_s, dtype=np.float64) / SPAN_S
    sums = np.concatenate(([0.0], np.cumsum(past)))
    whole, count = float(sums[-1]), len(past)
    ends = starts[None, :] + lengths[:, None]
    rounds, rest = np.divmod(ends, count)
    at = np.minimum(rest.astype(np.int64), count - 1)
    found = rounds * whole + sums[at] + (rest - at) * past[at] - sums[starts][None, :]
    return SPAN_S * np.asarray(np.quantile(found, SURE, axis=1))


def promised(demands: Sequence[Demand], past: Floats, nodes: float) -> dict[str, int]:
    """The jobs whose deadlines are held, with how many of these come before each."""
    if not demands:
        return {}
    ordered = sorted(demands, key=lambda d: (d.within_s, d.job))
    supply = node_time(past, nodes, [d.within_s for d in ordered]).tolist()
    taken: list[tuple[float, str, float]] = []
    total = 0.0
    for demand, there in zip(ordered, supply, strict=True):
        weight = demand.node_s * (KEPT if demand.before else 1.0)
        heapq.heappush(taken, (-weight, demand.job, demand.node_s))
        total += demand.node_s
        while taken and total > there:
            total -= heapq.heappop(taken)[2]
    kept = {job for _, job, _ in taken}
    return {job: rank for rank, job in enumerate(d.job for d in ordered if d.job in kept)}
