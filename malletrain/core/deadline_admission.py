"""Decides which deadlines are admitted when the nodes do not suffice for all of them. Pure.

Jobs are served in the order of their deadlines (earliest deadline first). A set of jobs is feasible
if, at each deadline, the node-time that the jobs up to it need is no more than the node-time
available by then. While it is not, the job that needs the most node-time is dropped, which drops
the fewest jobs (Moore, Management Science 15(1), 1968). A deadline that was admitted earlier is
dropped less readily, because a plan that changes its mind meets no deadline.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from malletrain.core.forecast import Floats, like_now
from malletrain.core.node_history import SPAN_S

ADMITTED_DEADLINE_WEIGHT = 0.6
"""Factor on the demand of a job whose deadline was admitted earlier, so that it is dropped less
readily than a new one.
"""
SUPPLY_QUANTILE = 0.3
"""Quantile of the past node-time that is used as supply."""


@dataclass(frozen=True)
class DeadlineDemand:
    """The node-time that one job needs until its deadline."""

    job: str
    within_s: float
    """Seconds until the deadline."""
    node_s: float
    """Node-seconds until the job is done."""
    admitted: bool = False
    """Whether the deadline was admitted at the previous decision."""


def node_time(past: Floats, nodes: float, within_s: Sequence[float]) -> Floats:
    """Return a conservative estimate of the available node-time.

    Args:
        past: number of nodes in each past span of ``SPAN_S`` seconds; the past is taken to repeat.
        nodes: number of nodes now.
        within_s: durations from now, seconds.

    Returns:
        Node-seconds available within each of ``within_s``.
    """
    starts = like_now(past, nodes)
    lengths = np.asarray(within_s, dtype=np.float64) / SPAN_S
    sums = np.concatenate(([0.0], np.cumsum(past)))
    total, spans = float(sums[-1]), len(past)
    ends = starts[None, :] + lengths[:, None]
    repeats, remainder = np.divmod(ends, spans)
    last = np.minimum(remainder.astype(np.int64), spans - 1)
    available = (
        repeats * total + sums[last] + (remainder - last) * past[last] - sums[starts][None, :]
    )
    return SPAN_S * np.asarray(np.quantile(available, SUPPLY_QUANTILE, axis=1))


def admit(demands: Sequence[DeadlineDemand], past: Floats, nodes: float) -> dict[str, int]:
    """Return the jobs whose deadlines are admitted.

    Args:
        demands: one for each job with a deadline.
        past: number of nodes in each past span, see :func:`node_time`.
        nodes: number of nodes now.

    Returns:
        Job → number of admitted jobs with an earlier deadline.
    """
    if not demands:
        return {}
    ordered = sorted(demands, key=lambda d: (d.within_s, d.job))
    supply = node_time(past, nodes, [d.within_s for d in ordered]).tolist()
    largest_first: list[tuple[float, str, float]] = []
    total_s = 0.0
    for demand, available_s in zip(ordered, supply, strict=True):
        weight = demand.node_s * (ADMITTED_DEADLINE_WEIGHT if demand.admitted else 1.0)
        heapq.heappush(largest_first, (-weight, demand.job, demand.node_s))
        total_s += demand.node_s
        while largest_first and total_s > available_s:
            total_s -= heapq.heappop(largest_first)[2]
    admitted = {job for _, job, _ in largest_first}
    return {job: rank for rank, job in enumerate(d.job for d in ordered if d.job in admitted)}
