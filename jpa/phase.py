"""The scaling curve of a job as long as its steps do the same work (one *phase*): estimates at
measured and other sizes, with uncertainty.

Decides the estimate at any size from the points of one phase and an optional prior. It does not
decide which phase a job is in (:mod:`jpa.curve`) and what to measure next (:mod:`jpa.profile`).

* At a measured size the estimate is the point itself.
* Between two sizes, seconds per sample are linear in 1/k, ``1/rate = s0 + s1/k``. This is Amdahl's
  law through the two points; it always stays between the two throughputs.
* Outside the points it is the α-β law (:mod:`jpa.fit`) through all points, scaled to pass through
  the outermost one.
* With a prior (a sibling job, an earlier phase, the curve before a drift) the ratio of measurement
  and prior is interpolated, and the result is limited to the range of the two measured neighbours.

Bids use :meth:`PhaseCurve.smoothed`. If three or more measured sizes agree with the α-β law within
their errors, it returns the law instead of the points; otherwise the allocator would distribute
nodes according to measurement errors.

Uncertainty: real curves deviate from any smooth law like a random walk in log2 k; the *roughness*
is its standard deviation per √octave. Between two points the walk is a Brownian bridge (variance ∝
d0·d1/(d0+d1)); outside it is free (variance ∝ d).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jpa.fit import AlphaBeta, fit
from jpa.points import ZERO_RATE, Point

ROUGHNESS = 0.04
"""The usual roughness, relative, per √octave. Measured on the curves of seven models on 1..64
nodes: interpolation at a dropped point between two that are two octaves apart has an error of 2.9 %
rms (median 1.4 %, one model 13 %), which is 4 % per √octave.
"""
_ROUGHNESS_PRIOR_POINTS = 2.0
"""Weight of the usual roughness, in inner points of the curve itself."""
_MAX_STD = 3.0
"""Upper bound on relative standard deviations."""
UNKNOWN_STD = 0.5
"""Relative standard deviation of a throughput without any information."""
_LAW_MIN_POINTS = 3
"""Minimum number of measured sizes with which the law may replace the points."""
_LAW_MAX_SIGMAS = 2.0
"""How far chi-squared of the points' deviations from the law may be above its mean, in its own
standard deviations (n points give n ± √(2n)).
"""


@dataclass(frozen=True)
class Prior:
    """A curve that is assumed before a measurement.

    Raises:
        ValueError: if there is no point, or a size or throughput is not positive.
    """

    points: tuple[tuple[int, float], ...]
    """((nodes, samples/s), ...), sorted, all above 0."""
    level_std: float
    """Relative standard deviation of its level."""
    shape_std: float
    """Relative standard deviation of its shape, per √octave."""
    source: str
    """Its origin, for the user."""

    def __post_init__(self) -> None:
        if not self.points or any(
            n < 1 or not (math.isfinite(r) and r > ZERO_RATE) for n, r in self.points
        ):
            raise ValueError(
                f"The prior from {self.source} needs sizes of 1 or more with throughputs above "
                f"0; it has {self.points}."
            )

    def rate(self, nodes: int) -> float:
        """Return the prior's throughput at ``nodes``, samples/s."""
        return self._curve.estimate(nodes)[0]

    def source_std(self, nodes: int) -> float:
        """Return the relative standard deviation of the source curve itself at ``nodes``: 0 within
        the range of its points.
        """
        if _octaves_outside(nodes, self.points) == 0:
            return 0.0
        rate, std = self._curve.estimate(nodes)
        return std / rate if rate > 0 else UNKNOWN_STD

    def scaled(self, factor: float, source: str | None = None) -> Prior:
        """Return the same shape at ``factor`` times the level; ``source``: the new origin, None for
        the same.
        """
        return replace(
            self,
            points=tuple((n, r * factor) for n, r in self.points),
            source=source or self.source,
        )

    @cached_property
    def _curve(self) -> PhaseCurve:
        return PhaseCurve(tuple(Point(n, r, (0.01 * r) ** 2) for n, r in self.points))


@dataclass(frozen=True)
class PhaseCurve:
    """The curve of one phase. Immutable: a change returns a new curve."""

    points: tuple[Point, ...] = ()
    """The measured sizes, ascending."""
    prior: Prior | None = None
    """The curve assumed before the measurements, if any."""

    def at(self, nodes: int) -> Point | None:
        """Return the point measured at ``nodes``, if any."""
        return next((p for p in self.points if p.nodes == nodes), None)

    def with_point(self, point: Point) -> PhaseCurve:
        """Return the curve with ``point`` added, or in place of the point of the same size."""
        others = [p for p in self.points if p.nodes != point.nodes]
        return replace(self, points=tuple(sorted([*others, point], key=lambda p: p.nodes)))

    def as_prior(
        self, factor: float, level_std: float, shape_std: float, source: str
    ) -> Prior | None:
        """Return this curve as a prior for another one.

        Args:
            factor: throughput of the other curve relative to this one.
            level_std: relative standard deviation of the level.
            shape_std: relative standard deviation of the shape, per √octave.
            source: the prior's origin, for the user.

        Returns:
            The prior; None if this curve has neither a throughput above 0 nor a prior.
        """
        points = tuple((p.nodes, p.rate * factor) for p in self.points if p.rate > 0)
        if points:
            return Prior(points, level_std, shape_std, source)
        if self.prior is not None:
            return Prior(
                self.prior.scaled(factor).points,
                math.hypot(level_std, self.prior.level_std),
                shape_std,
                source,
            )
        return None

    def estimate(self, nodes: int, neutral_rate: float = 1.0) -> tuple[float, float]:
        """Return the throughput at a size.

        Args:
            nodes: the size.
            neutral_rate: throughput of one node that is assumed without any point or prior,
                samples/s.

        Returns:
            (samples/s, standard deviation).
        """
        if nodes < 1:
            return 0.0, 0.0
        if not self.points:
            if self.prior is None:
                rate = neutral_throughput(nodes, neutral_rate)
                return rate, UNKNOWN_STD * rate
            rate = self.prior.rate(nodes)
            shape = self.prior.shape_std * math.sqrt(_octaves_outside(nodes, self.prior.points))
            return rate, rate * _bounded(
                self.prior.level_std**2 + shape**2 + self.prior.source_std(nodes) ** 2
            )
        point = self.at(nodes)
        if point is not None:
            return point.rate, point.std
        below = [p for p in self.points if p.nodes < nodes]
        above = [p for p in self.points if p.nodes > nodes]
        if below and above:
            return self._between(nodes, below[-1], above[0])
        edge = below[-1] if below else above[0]
        return (
            self._outside(nodes, edge)
            if edge.rate > 0
            else self._outside_zero(nodes, edge, neutral_rate)
        )

    def smoothed(self, nodes: int, neutral_rate: float = 1.0) -> tuple[float, float]:
        """Return (samples/s, standard deviation) at ``nodes`` for bids: from the law if it explains
        all points, else as :meth:`estimate`.
        """
        rate, std = self.estimate(nodes, neutral_rate)
        if nodes < 1 or not self._law_holds:
            return rate, std
        law_rate = self._law.rate(nodes)
        relative_std = (
            self._law.relative_std(nodes)
            if self.at(nodes) is not None
            else std / rate
            if rate > 0
            else 0.0
        )
        return law_rate, law_rate * relative_std

    def _between(self, nodes: int, low: Point, high: Point) -> tuple[float, float]:
        """Return the estimate between two neighbouring points."""
        to_low, to_high = math.log2(nodes / low.nodes), math.log2(high.nodes / nodes)  # octaves
        share = to_low / (to_low + to_high)
        if low.rate <= 0 or high.rate <= 0:
            # One end is 0: the curve falls to 0 at an unknown size between them.
            rate = low.rate + (high.rate - low.rate) * (nodes - low.nodes) / (
                high.nodes - low.nodes
            )
            return rate, rate / 2
        if self.prior is None:
            rate = amdahl(nodes, low.nodes, low.rate, high.nodes, high.rate)
        else:
            ratio_low = low.rate / self.prior.rate(low.nodes)
            ratio_high = high.rate / self.prior.rate(high.nodes)
            rate = self.prior.rate(nodes) * ratio_low ** (1 - share) * ratio_high**share
            rate = min(max(rate, min(low.rate, high.rate)), max(low.rate, high.rate))
        ends_variance = ((1 - share) * low.relative_std) ** 2 + (share * high.relative_std) ** 2
        bridge_variance = self._roughness**2 * to_low * to_high / (to_low + to_high)
        return rate, rate * _bounded(ends_variance + bridge_variance)

    def _outside(self, nodes: int, edge: Point) -> tuple[float, float]:
        """Return the estimate outside the points; ``edge``: the outermost one."""
        octaves = abs(math.log2(nodes / edge.nodes))
        walk_variance = self._roughness**2 * octaves
        if self.prior is not None:
            return _outside_with_prior(self.prior, nodes, edge, walk_variance)
        rate = edge.rate * self._law.rate(nodes) / self._law.rate(edge.nodes)
        return rate, rate * _bounded(self._law.relative_std(nodes) ** 2 + walk_variance)

    def _outside_zero(self, nodes: int, edge: Point, neutral_rate: float) -> tuple[float, float]:
        """Return the estimate outside the points if the throughput at the outermost one is 0: 0
        above it, unknown below it.
        """
        if nodes > edge.nodes:
            return 0.0, 0.0
        positive = [(p.nodes, p.rate, p.relative_std) for p in self.points if p.rate > 0]
        assumed = (
            self.prior.rate(nodes)
            if self.prior is not None
            else neutral_throughput(nodes, neutral_rate)
        )
        rate = fit(positive).rate(nodes) if positive else assumed
        return rate, UNKNOWN_STD * rate

    @cached_property
    def _law(self) -> AlphaBeta:
        return fit([(p.nodes, p.rate, p.relative_std) for p in self.points if p.rate > 0])

    @cached_property
    def _law_holds(self) -> bool:
        """Whether the points deviate from the law by no more than their errors (chi-squared)."""
        count = len(self.points)
        if (
            self.prior is not None
            or count < _LAW_MIN_POINTS
            or any(p.rate <= 0 or p.variance <= 0 for p in self.points)
        ):
            return False
        chi_squared = sum(
            ((p.rate / self._law.rate(p.nodes) - 1) / p.relative_std) ** 2 for p in self.points
        )
        return chi_squared <= count + _LAW_MAX_SIGMAS * math.sqrt(2 * count)

    @cached_property
    def _roughness(self) -> float:
        """Relative, per √octave: that of the prior's shape, or the mean of the usual one and the
        deviations of each inner point from its two neighbours.
        """
        if self.prior is not None:
            return self.prior.shape_std
        positive = [p for p in self.points if p.rate > 0]
        total, count = _ROUGHNESS_PRIOR_POINTS * ROUGHNESS**2, _ROUGHNESS_PRIOR_POINTS
        for low, middle, high in zip(positive, positive[1:], positive[2:], strict=False):
            to_low = math.log2(middle.nodes / low.nodes)
            to_high = math.log2(high.nodes / middle.nodes)
            share = to_low / (to_low + to_high)
            deviation = math.log(
                middle.rate / amdahl(middle.nodes, low.nodes, low.rate, high.nodes, high.rate)
            )
            noise = (
                middle.relative_std**2
                + ((1 - share) * low.relative_std) ** 2
                + (share * high.relative_std) ** 2
            )
            total += max(0.0, deviation**2 - noise) * (to_low + to_high) / (to_low * to_high)
            count += 1
        return math.sqrt(total / count)


def _outside_with_prior(
    prior: Prior, nodes: int, edge: Point, walk_variance: float
) -> tuple[float, float]:
    """Return the estimate outside the points: the shape of the prior, scaled to the outermost
    point.

    If the source of the prior has no measurement at the size of ``edge``, its shape is uncertain
    there, and its level may be the better guide. The result is then the mean of the two logarithms,
    weighted by precision.

    Args:
        prior: the prior.
        nodes: the size to estimate.
        edge: the nearest measured point.
        walk_variance: relative variance of the shape between ``edge`` and ``nodes``.

    Returns:
        (samples/s, standard deviation).
    """
    source_variance = prior.source_std(nodes) ** 2
    edge_variance = prior.source_std(edge.nodes) ** 2
    shape_variance = edge.relative_std**2 + walk_variance + edge_variance
    level_variance = prior.level_std**2
    level_weight = shape_variance / (shape_variance + level_variance) if edge_variance else 0.0
    by_shape = edge.rate * prior.rate(nodes) / prior.rate(edge.nodes)
    rate = by_shape ** (1 - level_weight) * prior.rate(nodes) ** level_weight
    return rate, rate * _bounded(source_variance + (1 - level_weight) * shape_variance)


def _bounded(variance: float) -> float:
    """Return the standard deviation, at most ``_MAX_STD``."""
    return min(math.sqrt(variance), _MAX_STD)


def amdahl(nodes: int, low: int, low_rate: float, high: int, high_rate: float) -> float:
    """Return the throughput on the curve 1/rate = s0 + s1/k through two points.

    Args:
        nodes: the size to evaluate.
        low: the smaller size.
        low_rate: its throughput, samples/s, above 0.
        high: the larger size.
        high_rate: its throughput, samples/s, above 0.

    Returns:
        Samples/s; between the two sizes it lies between the two throughputs.
    """
    share = (1 / nodes - 1 / low) / (1 / high - 1 / low)
    return 1 / (1 / low_rate + share * (1 / high_rate - 1 / low_rate))


def neutral_throughput(nodes: int, rate_per_node: float) -> float:
    """Return the curve of a job without any information, samples/s: ``rate_per_node * nodes**0.9``,
    which loses 6.7 % of the throughput per node with each doubling.
    """
    return rate_per_node * float(nodes**0.9)


def _octaves_outside(nodes: int, points: Sequence[tuple[int, float]]) -> float:
    """Return the distance of ``nodes`` from the range of ``points``, octaves; 0 inside."""
    low, high = points[0][0], points[-1][0]
    if nodes < low:
        return math.log2(low / nodes)
    return math.log2(nodes / high) if nodes > high else 0.0
