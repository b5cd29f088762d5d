"""Forecasts when a job completes, from its scaling curve and the nodes of the last days. Pure.

The model is that the past repeats. It takes the past moments whose number of nodes was closest to
the present one, and continues the job from each of them with the numbers of nodes that followed.
The median of the ends is the forecast, the 10th and the 90th percentile its 80 % interval.

The caller states how many of the nodes the job gets: a share of them, and at least a floor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from malletrain.core.node_history import SPAN_S

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
