"""What is known of the throughput at one size, and how every further observation moves it.

Decides the weight of a new observation against the old ones and when the size has drifted. It knows
one size only; what lies between sizes is :mod:`jpa.phase`.

A size is a level that wanders slowly under noisy observations, so its estimate is the scalar Kalman
filter of the local level model (Harvey, "Forecasting, Structural Time Series Models and the Kalman
Filter", 1989, section 4.1): exact while observations are few, exponential smoothing with a constant
gain once they are many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from jpa import drift

_CRUDE_STD = 0.3
"""Relative standard deviation of a throughput seen in so few reports that its scatter could not be
seen.
"""
NOTHING = 1e-9
"""A throughput below this, samples/s (one sample in thirty years), is 0."""
CI95 = 1.96
"""Standard deviations in the half-width of a 95 % interval."""


@dataclass(frozen=True)
class PointConfig:
    """How observations of one size are weighed. All are shares of the throughput (standard
    deviations).
    """

    visit_std: float = 0.01
    """A size measured twice differs by about this much, however long each measurement took (other
    nodes, other neighbours).
    """
    window_std: float = 0.02
    """An ordinary window of the monitor scatters at least this much."""
    wander: float = 0.003
    """The true throughput wanders this much between two observations; it sets how fast old ones are
    forgotten.
    """
    drift_tolerance: float = 0.05
    """Lasting shifts smaller than this are followed silently; larger ones are reported as a drift.
    """


@dataclass(frozen=True)
class Point:
    """What is known of one size."""

    nodes: int
    """The size."""
    rate: float
    """Samples/s."""
    variance: float
    """Of the rate, not of single observations, (samples/s)²."""
    observations: int = 1
    """How many there were."""
    updated: float = 0.0
    """When the last one was, seconds on the caller's clock."""
    cusum: drift.Cusum = field(default_factory=drift.Cusum)
    """The running sums of its drift detection."""

    @cached_property
    def std(self) -> float:
        """Standard deviation of ``rate``, samples/s."""
        return math.sqrt(self.variance)

    @cached_property
    def relative_std(self) -> float:
        """``std`` as a share of ``rate``; 0 where the measured throughput is 0."""
        return self.std / self.rate if self.rate > 0 else 0.0


def checked(nodes: int, rate: float) -> float:
    """``rate``, or 0 where it is next to nothing. Raises ValueError when it is not a finite number
    of 0 or more, or the size is below 1.
    """
    if nodes < 1:
        raise ValueError(f"A throughput was reported for {nodes} nodes; sizes start at 1.")
    if not math.isfinite(rate) or rate < 0:
        raise ValueError(
            f"Throughput {rate} at {nodes} nodes is not a finite number of samples/s, 0 or "
            "more; it is not used."
        )
    return rate if rate > NOTHING else 0.0


def new_point(nodes: int, rate: float, half_width: float, now: float, config: PointConfig) -> Point:
    """A size measured for the first time. ``half_width``: of the 95 % interval, samples/s; infinite
    when nothing is known of it.
    """
    rate = checked(nodes, rate)
    return Point(nodes, rate, _variance(rate, half_width, config.visit_std), updated=now)


def remeasured(
    point: Point, rate: float, half_width: float, now: float, config: PointConfig
) -> Point:
    """A size that the profile visits again: averaged with what was known if both agree within 3
    standard deviations, else replaced.
    """
    fresh = new_point(point.nodes, rate, half_width, now, config)
    if (
        abs(rate - point.rate) > drift.CLIP * math.sqrt(point.variance + fresh.variance)
        or point.rate == 0
    ):
        return fresh
    gain = _gain(point.variance, fresh.variance)
    return Point(
        point.nodes,
        point.rate + gain * (rate - point.rate),
        (1 - gain) * point.variance,
        point.observations + 1,
        now,
        point.cusum,
    )


def observed(
    point: Point, rate: float, half_width: float, now: float, config: PointConfig
) -> tuple[Point, drift.Shift | None]:
    """One ordinary observation of the monitor.

    Returns:
        The new point, and the shift when the size has drifted by more than ``drift_tolerance``,
        else None. After a drift the point stands at the new level.
    """
    rate = checked(point.nodes, rate)
    noise = _variance(rate if rate > 0 else point.rate, half_width, config.window_std)
    before = point.variance + (config.wander * point.rate) ** 2
    spread = math.sqrt(before + noise)
    if spread == 0:  # a size measured as 0 that still gives 0
        return replace(point, observations=point.observations + 1, updated=now), None
    cusum, shift = drift.step(point.cusum, rate, point.rate, spread)
    if shift is not None:
        if abs(shift.after - shift.before) > config.drift_tolerance * shift.before:
            return Point(
                point.nodes,
                shift.after,
                _variance(shift.after, 0.0, config.window_std),
                updated=now,
            ), shift
        before += (shift.after - point.rate) ** 2  # a small lasting shift: let the level move there
    gain = _gain(before, noise)
    moved = Point(
        point.nodes,
        max(0.0, point.rate + gain * drift.clip((rate - point.rate) / spread) * spread),
        (1 - gain) * before,
        point.observations + 1,
        now,
        cusum,
    )
    return moved, None


def _gain(old: float, new: float) -> float:
    """Weight of a value of variance ``new`` against one of variance ``old``; two exact ones (both
    0) weigh the same.
    """
    return old / (old + new) if old + new > 0 else 0.5


def _variance(rate: float, half_width: float, floor: float) -> float:
    std = half_width / CI95 if math.isfinite(half_width) else _CRUDE_STD * rate
    return max(std, floor * rate) ** 2
