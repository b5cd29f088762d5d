"""Forecasts the number of nodes and when a job completes, from its scaling curve and the nodes of
the last days, and decides which deadlines are admitted. Pure.

The model is that the past repeats. It takes the past moments whose number of nodes was closest to
the present one, and continues the job from each of them with the numbers of nodes that followed.
The median of the ends is the forecast, the 10th and the 90th percentile its 80 % interval. The
caller states how many of the nodes the job gets: a share of them, and at least a floor.

Deadlines are admitted in their order (earliest deadline first). A set of jobs is feasible if, at
each deadline, the node-time that the jobs up to it need is no more than the node-time available by
then. While it is not, the job that needs the most node-time is dropped, which drops the fewest jobs
(Moore, Management Science 15(1), 1968). A deadline that was admitted earlier is dropped less
readily, because a plan that changes its mind meets no deadline.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from malletrain.core.node_history import SPAN_S

QUANTILES = (0.1, 0.5, 0.9)


def nodes_ahead(past: Floats, now: float, spans: int) -> Floats:
    """Return the quantiles of the number of nodes in each of the next ``spans`` spans.

    Args:
        past: number of nodes in each past span, the oldest first. It is repeated periodically.
        now: current number of nodes.
        spans: number of spans to forecast.

    Returns:
        Array of shape (spans, 3): a column for each of :data:`QUANTILES`.
    """
    starts = like_now(past, now)
    later = (starts[None, :] + np.arange(1, spans + 1)[:, None]) % len(past)
    quantiles: Floats = np.quantile(past[later], QUANTILES, axis=1).T
    return quantiles


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


Floats = npt.NDArray[np.float64]

SIMILAR_MOMENTS = 96
"""Number of past moments that are used: those most like the present."""
THROUGHPUT_FACTORS = (0.85, 1.0, 1.15)
"""Factors on the job's throughput, for its uncertainty. Each moment counts with each factor."""


@dataclass(frozen=True)
class Forecast:
    """Time at which the work is done, on the shell's clock; infinite if it never is on such
    nodes.
    """

    end: float
    """Median."""
    low: float
    """Low end of the 80 % interval."""
    high: float
    """High end of the 80 % interval."""
    hours: float = 0.0
    """Length of the past that it is based on, hours; 0 if it is based only on the present number of
    nodes.
    """


@dataclass(frozen=True)
class Claim:
    """The part of the available nodes that a job gets."""

    share: float = 1.0
    """Fraction of the nodes."""
    floor: float = 0.0
    """Minimum number of nodes."""
    least: int | None = None
    """Minimum number of nodes that it can use. If its part is smaller, it takes turns with other
    jobs: it has the minimum for a part of the time, while there are enough nodes. None if it has
    its part or nothing.
    """

    def of(self, nodes: Floats) -> Floats:
        """Return the job's part of ``nodes`` nodes."""
        job_nodes: Floats = np.minimum(nodes, np.maximum(self.share * nodes, self.floor))
        return job_nodes

    def speed(self, rates: Floats, nodes: Floats) -> Floats:
        """Return samples/s with ``nodes`` available nodes; ``rates``: samples/s at 0, 1, 2, … of
        its own nodes.
        """
        if self.least is None:
            return speeds(rates, self.of(nodes))
        turns, at = rates.copy(), np.arange(len(rates))
        turns[: self.least] = rates[self.least] * at[: self.least] / self.least
        throughput: Floats = np.interp(self.of(nodes), at, turns)
        # A mean of 3.2 nodes may include times with four; a mean of 3 is taken as three throughout.
        return np.where(np.ceil(nodes - 1e-9) >= self.least, throughput, 0.0)


def fair_share(max_sizes: Iterable[int], nodes: float) -> float:
    """Return the fraction of ``nodes`` that a job gets if jobs with these maximum sizes share them
    evenly, and each leaves what it cannot use to the others.
    """
    sizes = sorted(max_sizes)
    remaining = nodes
    for index, size in enumerate(sizes):
        level = remaining / (len(sizes) - index)
        if size >= level:
            return level / nodes if nodes > 0 else 1.0
        remaining -= size
    return 1.0


def like_now(past: Floats, now: float) -> npt.NDArray[np.int64]:
    """Return the indices of the past moments whose number of nodes is closest to ``now``."""
    if len(past) <= SIMILAR_MOMENTS:
        return np.arange(len(past))
    return np.argpartition(np.abs(past - now), SIMILAR_MOMENTS)[:SIMILAR_MOMENTS]


def speeds(rates: Floats, nodes: Floats) -> Floats:
    """Return samples/s on ``nodes`` nodes; ``rates``: at 0, 1, 2, … nodes. The last one applies to
    all larger numbers.
    """
    at = np.minimum(np.rint(nodes).astype(np.int64), len(rates) - 1)
    throughput: Floats = rates[at]
    return throughput


def seconds_for(work: Floats, speed: Floats, starts: npt.NDArray[np.int64]) -> Floats:
    """Return the time to process samples, seconds; infinite if nothing is ever processed.

    Args:
        work: numbers of samples.
        speed: samples/s in each past span. It is repeated periodically.
        starts: indices of the spans to start from.

    Returns:
        Array of shape (len(work), len(starts)).
    """
    sums = np.concatenate(([0.0], np.cumsum(speed * SPAN_S)))
    period_samples = float(sums[-1])
    if period_samples <= 0:
        return np.full((len(work), len(starts)), math.inf)
    target = sums[starts] + work[:, None]
    rounds, remaining = np.divmod(target, period_samples)
    at = np.minimum(np.searchsorted(sums, remaining, side="right"), len(speed)) - 1
    within = np.clip((remaining - sums[at]) / np.maximum(speed[at] * SPAN_S, 1e-300), 0.0, 1.0)
    seconds: Floats = (rounds * len(speed) + at + within - starts) * SPAN_S
    return seconds


def forecast(
    work: float, rates: Floats, past: Floats, nodes: float, claim: Claim, now: float
) -> Forecast:
    """Forecast when a job that continues now will be done.

    Args:
        work: remaining samples.
        rates: real throughput of the job at 0, 1, 2, … nodes, samples/s, including pauses.
        past: number of nodes in each past span, the oldest first.
        nodes: current number of nodes.
        claim: part of the nodes that the job gets.
        now: time on the shell's clock.
    """
    starts = like_now(past, nodes)
    speed = claim.speed(rates, past)
    ends = seconds_for(work / np.array(THROUGHPUT_FACTORS), speed, starts)
    low, end, high = np.quantile(ends, (0.1, 0.5, 0.9), method="higher")
    hours = len(past) * SPAN_S / 3600.0 if len(past) > 1 else 0.0
    return Forecast(now + float(end), now + float(low), now + float(high), hours)


def least_floor(
    work: float, within_s: float, rates: Floats, past: Floats, nodes: float, sizes: list[int]
) -> int:
    """Return the smallest of ``sizes`` (ascending) with which the job ends in time in 90 % of the
    cases, if it always gets that many of the available nodes; the largest, if none suffices.

    Args:
        work: remaining samples.
        within_s: time to the deadline, seconds.
        rates: see :func:`forecast`.
        past: see :func:`forecast`.
        nodes: current number of nodes.
        sizes: allowed sizes, ascending.
    """
    low, high = 0, len(sizes) - 1
    starts, samples = like_now(past, nodes), np.array([work])
    while low < high:
        middle = (low + high) // 2
        speed = speeds(rates, np.minimum(past, sizes[middle]))
        late = seconds_for(samples, speed, starts) > within_s
        if np.mean(late) > 0.1:
            low = middle + 1
        else:
            high = middle
    return sizes[low]
