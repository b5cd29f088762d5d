"""The estimate of the throughput at one size, its update by observations, and the detection of
drift.

Decides the weight of a new observation against the old ones, and when the size has drifted. It does
not estimate other sizes (:mod:`jpa.phase`), and does not decide what follows a drift
(:mod:`jpa.curve` turns the old curve into a prior).

:class:`Point`: the throughput at a size is a level that changes slowly under noisy observations.
The estimate is the scalar Kalman filter of the local level model (Harvey, "Forecasting, Structural
Time Series Models and the Kalman Filter", 1989, section 4.1). It is exact for few observations and
becomes exponential smoothing with a constant gain for many.

:class:`Cusum`: a two-sided CUSUM on the standardised residuals detects that a series of
observations no longer fits its mean. Page, "Continuous inspection schemes", Biometrika 41, 1954;
Montgomery, "Introduction to Statistical Quality Control", chapter 9: S⁺ ← max(0, S⁺ + z − k), S⁻ ←
max(0, S⁻ − z − k), alarm when either exceeds h. With k = 0.5 and h = 8 Siegmund's approximation
gives one false alarm per side in about 19,000 observations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

ALLOWANCE = 0.5
"""k, standard deviations: the scheme is designed for shifts of at least twice this."""
DECISION_INTERVAL = 8.0
"""h, standard deviations."""
MAX_RESIDUAL = 3.0
"""Residuals are clipped here, standard deviations. A single stalled window raises no alarm: it
takes four in a row.
"""


@dataclass(frozen=True)
class Side:
    """One of the two cumulative sums, and the observations since it was last 0."""

    total: float = 0.0
    """The cumulative sum, standard deviations."""
    count: int = 0
    """Number of observations."""
    sum: float = 0.0
    """Sum of the observations, samples/s."""
    before: float = 0.0
    """The mean before them, samples/s."""


@dataclass(frozen=True)
class Cusum:
    """The state of the detection at one size."""

    high: Side = Side()
    """S⁺, for an increase."""
    low: Side = Side()
    """S⁻, for a decrease."""


@dataclass(frozen=True)
class Shift:
    """A lasting change of the throughput."""

    before: float
    """The mean before it began, samples/s."""
    after: float
    """The mean of the observations since, samples/s."""


def clip(residual: float) -> float:
    """Return ``residual`` (standard deviations) within ±``MAX_RESIDUAL``."""
    return max(-MAX_RESIDUAL, min(MAX_RESIDUAL, residual))


def step(state: Cusum, observation: float, mean: float, std: float) -> tuple[Cusum, Shift | None]:
    """Process one observation.

    Args:
        state: the sums so far.
        observation: samples/s.
        mean: the expected observation, samples/s.
        std: its standard deviation, samples/s.

    Returns:
        The new state, and the shift if there is an alarm. After an alarm the state is reset.
    """
    z = clip((observation - mean) / std)
    high = _updated(state.high, z, observation, mean)
    low = _updated(state.low, -z, observation, mean)
    for side in (high, low):
        if side.total > DECISION_INTERVAL:
            return Cusum(), Shift(side.before, side.sum / side.count)
    return Cusum(high, low), None


def _updated(side: Side, z: float, observation: float, mean: float) -> Side:
    total = max(0.0, side.total + z - ALLOWANCE)
    if total == 0:
        return Side()
    before = side.before if side.count else mean
    return Side(total, side.count + 1, side.sum + observation, before)


_FEW_REPORTS_STD = 0.3
"""Relative standard deviation of a throughput from too few reports to estimate their scatter."""
ZERO_RATE = 1e-9
"""A throughput below this, samples/s (one sample in thirty years), counts as 0."""
CI95 = 1.96
"""Half-width of a 95 % interval, standard deviations."""


@dataclass(frozen=True)
class PointConfig:
    """How observations of one size are weighted. All values are relative to the throughput."""

    visit_std: float = 0.01
    """Standard deviation between visits to the same size, however long each of them is (other
    nodes, other neighbours).
    """
    window_std: float = 0.02
    """Lower bound on the standard deviation of a window of the monitor."""
    process_std: float = 0.003
    """Standard deviation of the change of the true throughput between two observations. It sets how
    fast old observations lose weight.
    """
    drift_tolerance: float = 0.05
    """Lasting shifts larger than this are reported as a drift; smaller ones only move the estimate.
    """


@dataclass(frozen=True)
class Point:
    """The estimate at one size."""

    nodes: int
    """The size."""
    rate: float
    """Estimated throughput, samples/s."""
    variance: float
    """Variance of the estimate (not of single observations), (samples/s)²."""
    observations: int = 1
    """Number of observations."""
    updated: float = 0.0
    """Time of the last observation, seconds on the caller's clock."""
    cusum: Cusum = field(default_factory=Cusum)
    """State of the drift detection."""

    @cached_property
    def std(self) -> float:
        """Standard deviation of ``rate``, samples/s."""
        return math.sqrt(self.variance)

    @cached_property
    def relative_std(self) -> float:
        """``std`` divided by ``rate``; 0 if the throughput is 0."""
        return self.std / self.rate if self.rate > 0 else 0.0


def validated_rate(nodes: int, rate: float) -> float:
    """Return ``rate``, or 0 if it is below ``ZERO_RATE``, samples/s.

    Raises:
        ValueError: if ``rate`` is negative or not finite, or ``nodes`` is below 1.
    """
    if nodes < 1:
        raise ValueError(f"A throughput was reported for {nodes} nodes; sizes start at 1.")
    if not math.isfinite(rate) or rate < 0:
        raise ValueError(
            f"Throughput {rate} at {nodes} nodes is not a finite number of samples/s, 0 or "
            "more; it is not used."
        )
    return rate if rate > ZERO_RATE else 0.0


def new_point(nodes: int, rate: float, half_width: float, now: float, config: PointConfig) -> Point:
    """Return the estimate from the first measurement of a size.

    Args:
        nodes: the size.
        rate: samples/s.
        half_width: half-width of the 95 % interval, samples/s; infinite if unknown.
        now: the time, seconds.
        config: weights.

    Raises:
        ValueError: as :func:`validated_rate`.
    """
    rate = validated_rate(nodes, rate)
    return Point(nodes, rate, _variance(rate, half_width, config.visit_std), updated=now)


def remeasure(
    point: Point, rate: float, half_width: float, now: float, config: PointConfig
) -> Point:
    """Update an estimate with another visit of a profile.

    Args:
        point: the estimate so far.
        rate: samples/s.
        half_width: half-width of the 95 % interval, samples/s; infinite if unknown.
        now: the time, seconds.
        config: weights.

    Returns:
        The weighted mean if both agree within 3 standard deviations, else the new measurement.

    Raises:
        ValueError: as :func:`validated_rate`.
    """
    measured = new_point(point.nodes, rate, half_width, now, config)
    if (
        abs(rate - point.rate) > MAX_RESIDUAL * math.sqrt(point.variance + measured.variance)
        or point.rate == 0
    ):
        return measured
    gain = _gain(point.variance, measured.variance)
    return Point(
        point.nodes,
        point.rate + gain * (rate - point.rate),
        (1 - gain) * point.variance,
        point.observations + 1,
        now,
        point.cusum,
    )


def observe(
    point: Point, rate: float, half_width: float, now: float, config: PointConfig
) -> tuple[Point, Shift | None]:
    """Update an estimate with one window of the monitor.

    Args:
        point: the estimate so far.
        rate: samples/s.
        half_width: half-width of the 95 % interval, samples/s; infinite if unknown.
        now: the time, seconds.
        config: weights.

    Returns:
        The new estimate, and the shift if the size has drifted by more than ``drift_tolerance``,
        else None. After a drift the estimate is at the new level.

    Raises:
        ValueError: as :func:`validated_rate`.
    """
    rate = validated_rate(point.nodes, rate)
    noise = _variance(rate if rate > 0 else point.rate, half_width, config.window_std)
    predicted = point.variance + (config.process_std * point.rate) ** 2
    std = math.sqrt(predicted + noise)
    if std == 0:  # the throughput was 0 and still is
        return replace(point, observations=point.observations + 1, updated=now), None
    cusum, shift = step(point.cusum, rate, point.rate, std)
    if shift is not None:
        if abs(shift.after - shift.before) > config.drift_tolerance * shift.before:
            return Point(
                point.nodes,
                shift.after,
                _variance(shift.after, 0.0, config.window_std),
                updated=now,
            ), shift
        # A small lasting shift: raise the variance, so that the level moves there.
        predicted += (shift.after - point.rate) ** 2
    gain = _gain(predicted, noise)
    updated = Point(
        point.nodes,
        max(0.0, point.rate + gain * clip((rate - point.rate) / std) * std),
        (1 - gain) * predicted,
        point.observations + 1,
        now,
        cusum,
    )
    return updated, None


def _gain(old_variance: float, new_variance: float) -> float:
    """Return the weight of a new value against an old one; two exact values have the same
    weight.
    """
    total = old_variance + new_variance
    return old_variance / total if total > 0 else 0.5


def _variance(rate: float, half_width: float, min_relative_std: float) -> float:
    std = half_width / CI95 if math.isfinite(half_width) else _FEW_REPORTS_STD * rate
    return max(std, min_relative_std * rate) ** 2
