"""Forecasts when a job completes, from its scaling curve and the nodes of the last days. Pure.

The model is that the past repeats: from each past moment with a number of nodes most like the
present one, the job is continued through what followed. The median of the ends is the forecast, the
tenth and the ninetieth percentile its 80 % interval.

The caller assumes which of the nodes the job gets: a share of them, and at least a floor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from malletrain.core.node_history import SPAN_S

Floats = npt.NDArray[np.float64]

LIKE = 96
"""So many past moments are looked at, those most like the present."""
SPREAD = (0.85, 1.0, 1.15)
"""A job's own speed is not known better than this: each moment counts with each of these."""


@dataclass(frozen=True)
class Forecast:
    """When the work is done, on the shell's clock; infinite: it never is on such nodes."""

    end: float
    low: float
    high: float
    """The ends of the 80 % interval."""
    hours: float = 0.0
    """Of the past that it was made from; 0: of nothing but the present number of nodes."""


@dataclass(frozen=True)
class Claim:
    """How many of the nodes there are a job gets."""

    share: float = 1.0
    floor: float = 0.0
    least: int | None = None
    """The fewest nodes that it can use. Where its part is smaller, it has so many for a part of the
    time: it takes turns with others, while there are so many. None: it has its part or nothing."""

    def of(self, nodes: Floats) -> Floats:
        """The job's part of so many nodes."""
        job_nodes: Floats = np.minimum(nodes, np.maximum(self.share * nodes, self.floor))
        return job_nodes

    def speed(self, rates: Floats, nodes: Floats) -> Floats:
        """Samples/s where there are so many nodes; ``rates``: at 0, 1, 2, … of its own."""
        if self.least is None:
            return speeds(rates, self.of(nodes))
        turns, at = rates.copy(), np.arange(len(rates))
        turns[: self.least] = rates[self.least] * at[: self.least] / self.least
        throughput: Floats = np.interp(self.of(nodes), at, turns)
        # A mean of 3.2 nodes may have been four for a while; one of 3 was not.
        return np.where(np.ceil(nodes - 1e-9) >= self.least, throughput, 0.0)


def fair_share(most: Iterable[int], nodes: float) -> float:
    """The part of ``nodes`` that a job gets where jobs that can use ``most`` each share them evenly
    and leave what they cannot use to the others.
    """
    sizes = sorted(most)
    remaining = nodes
    for taken, size in enumerate(sizes):
        level = remaining / (len(sizes) - taken)
        if size >= level:
            return level / nodes if nodes > 0 else 1.0
        remaining -= size
    return 1.0


def like_now(past: Floats, now: float) -> npt.NDArray[np.int64]:
    """Which moments of the past are most like one with ``now`` nodes."""
    if len(past) <= LIKE:
        return np.arange(len(past))
    return np.argpartition(np.abs(past - now), LIKE)[:LIKE]


def speeds(rates: Floats, nodes: Floats) -> Floats:
    """Samples/s on so many nodes; ``rates``: at 0, 1, 2, … nodes, the last for all beyond."""
    at = np.minimum(np.rint(nodes).astype(np.int64), len(rates) - 1)
    throughput: Floats = rates[at]
    return throughput


def seconds_for(work: Floats, speed: Floats, starts: npt.NDArray[np.int64]) -> Floats:
    """How long each of ``work`` samples takes from each of the ``starts`` of a past with these
    speeds, which comes again and again; infinite where nothing is ever processed. A row for each
    of ``work``, a column for each start.
    """
    sums = np.concatenate(([0.0], np.cumsum(speed * SPAN_S)))
    whole = float(sums[-1])
    if whole <= 0:
        return np.full((len(work), len(starts)), math.inf)
    target = sums[starts] + work[:, None]
    rounds, rest = np.divmod(target, whole)
    at = np.minimum(np.searchsorted(sums, rest, side="right"), len(speed)) - 1
    within = np.clip((rest - sums[at]) / np.maximum(speed[at] * SPAN_S, 1e-300), 0.0, 1.0)
    seconds: Floats = (rounds * len(speed) + at + within - starts) * SPAN_S
    return seconds


def forecast(
    work: float, rates: Floats, past: Floats, nodes: float, claim: Claim, now: float
) -> Forecast:
    """When a job will be done that begins to go on now.

    Args:
        work: samples left.
        rates: what the job really gets done at 0, 1, 2, … nodes, samples/s, pauses included.
        past: nodes there were, a span each, the oldest first.
        nodes: how many there are now.
        claim: which of them the job gets.
        now: on the shell's clock.
    """
    starts = like_now(past, nodes)
    speed = claim.speed(rates, past)
    ends = seconds_for(work / np.array(SPREAD), speed, starts)
    low, end, high = np.quantile(ends, (0.1, 0.5, 0.9), method="higher")
    hours = len(past) * SPAN_S / 3600.0 if len(past) > 1 else 0.0
    return Forecast(now + float(end), now + float(low), now + float(high), hours)


def least_floor(
    work: float, within_s: float, rates: Floats, past: Floats, nodes: float, sizes: list[int]
) -> int:
    """The fewest nodes, of ``sizes`` (ascending), with which a job that always gets so many of
    those that are there ends in time in nine of ten cases; the most, where none suffices.
    """
    low, high = 0, len(sizes) - 1
    starts, all_of_it = like_now(past, nodes), np.array([work])
    while low < high:
        middle = (low + high) // 2
        speed = speeds(rates, np.minimum(past, sizes[middle]))
        late = seconds_for(all_of_it, speed, starts) > within_s
        if np.mean(late) > 0.1:
            low = middle + 1
        else:
            high = middle
    return sizes[low]
