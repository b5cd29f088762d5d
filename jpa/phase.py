"""The scaling curve of one phase of a job: measured sizes, what lies between them and outside, and
how sure that is.

Decides the estimate at any size from the points of one phase and an optional prior shape. It does
not decide which phase a job is in (:mod:`jpa.curve`) nor what to measure next (:mod:`jpa.plan`).

* At a measured size: the point itself.
* Between two sizes: seconds per sample run linearly in 1/k, ``1/rate = s0 + s1/k``. That is
  Amdahl's law through the two points, and it always stays between the two throughputs (no invented
  peak or dip), whichever way they lie.
* Outside: the α-β law (:mod:`jpa.fit`) through all points, moved to pass through the outermost one.
* Where the α-β law through three measured sizes or more leaves out no more than noise, bids are
  made from the law instead of the single points (:meth:`PhaseCurve.smoothed`): else the plan would
  split nodes by the errors of the measurement.
* With a prior shape (a sibling job, an earlier phase, the curve before a drift): the prior's curve,
  with the ratio measured/prior interpolated, and never outside the range of the two measured
  neighbours.

Uncertainty: real curves leave any smooth law like a random walk in log2 k; the roughness is its
standard deviation per √octave. Between two points the walk is tied at both ends (Brownian bridge,
variance ∝ d0·d1/(d0+d1)); outside it is free (∝ d).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jpa.fit import AlphaBeta, fit
from jpa.points import NOTHING, Point

ROUGHNESS = 0.04
"""Per √octave, relative. Measured on the curves of seven models on 1..64 nodes: dropping a point
between two that are two octaves apart gives an interpolation error of 2.9 % rms (one model alone 13
%, the median 1.4 %), i.e. 4 % per √octave.
"""
_ROUGHNESS_WEIGHT = 2.0
"""The usual roughness weighs as much as so many inner points of the curve itself."""
_MOST_STD = 3.0
UNKNOWN_STD = 0.5
"""Relative standard deviation of a throughput about which nothing is known."""
_LAW_POINTS = 3
"""The law may be used from so many measured sizes on."""
_LAW_SIGMAS = 2.0
"""... when the squared deviations of the points from it, in their own standard deviations, sum to
no more than this many standard deviations above their mean (chi-squared: n points give n ± √(2n)).
"""


@dataclass(frozen=True)
class Prior:
    """A curve suggested before measuring."""

    points: tuple[tuple[int, float], ...]
    """((nodes, samples/s), ...) sorted, all above 0."""
    level_std: float
    """How wrong the whole curve may be, relative."""
    shape_std: float
    """How wrong its shape may be, relative, per √octave."""
    source: str
    """Where it comes from, for the user."""

    def __post_init__(self) -> None:
        if not self.points or any(
            n < 1 or not (math.isfinite(r) and r > NOTHING) for n, r in self.points
        ):
            raise ValueError(
                f"The prior from {self.source} needs sizes of 1 or more with throughputs above "
                f"0; it has {self.points}."
            )

    def rate(self, nodes: int) -> float:
        """The prior's throughput at ``nodes``, samples/s."""
        return self._curve.estimate(nodes)[0]

    def own_std(self, nodes: int) -> float:
        """How little the one it comes from is known at ``nodes`` itself, relative: 0 within the
        sizes measured there.
        """
        if _outside(nodes, self.points) == 0:
            return 0.0
        rate, std = self._curve.estimate(nodes)
        return std / rate if rate > 0 else UNKNOWN_STD

    def scaled(self, factor: float, source: str | None = None) -> Prior:
        """The same shape at ``factor`` times the level."""
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
    """The curve of one phase."""

    points: tuple[Point, ...] = ()
    """What was measured, sorted by size."""
    prior: Prior | None = None
    """What was known before, if anything."""

    def at(self, nodes: int) -> Point | None:
        """The measured point of that size, if any."""
        return next((p for p in self.points if p.nodes == nodes), None)

    def with_point(self, point: Point) -> PhaseCurve:
        """With ``point`` in the place of the one of the same size."""
        others = [p for p in self.points if p.nodes != point.nodes]
        return replace(self, points=tuple(sorted([*others, point], key=lambda p: p.nodes)))

    def as_prior(
        self, factor: float, level_std: float, shape_std: float, source: str
    ) -> Prior | None:
        """This curve as a prior for another one of ``factor`` times its speed; None when it
        knows nothing.
        """
        known = tuple((p.nodes, p.rate * factor) for p in self.points if p.rate > 0)
        if known:
            return Prior(known, level_std, shape_std, source)
        if self.prior is not None:
            return Prior(
                self.prior.scaled(factor).points,
                math.hypot(level_std, self.prior.level_std),
                shape_std,
                source,
            )
        return None

    def estimate(self, nodes: int, neutral_rate: float = 1.0) -> tuple[float, float]:
        """(samples/s, standard deviation) at ``nodes``.

        ``neutral_rate``: samples/s of one node assumed when neither a point nor a prior exists.
        """
        if nodes < 1:
            return 0.0, 0.0
        if not self.points:
            if self.prior is None:
                rate = neutral(nodes, neutral_rate)
                return rate, UNKNOWN_STD * rate
            rate = self.prior.rate(nodes)
            shape = self.prior.shape_std * math.sqrt(_outside(nodes, self.prior.points))
            return rate, rate * _bounded(
                self.prior.level_std**2 + shape**2 + self.prior.own_std(nodes) ** 2
            )
        exact = self.at(nodes)
        if exact is not None:
            return exact.rate, exact.std
        below = [p for p in self.points if p.nodes < nodes]
        above = [p for p in self.points if p.nodes > nodes]
        if below and above:
            return self._between(nodes, below[-1], above[0])
        edge = below[-1] if below else above[0]
        return (
            self._outside(nodes, edge)
            if edge.rate > 0
            else self._beyond_nothing(nodes, edge, neutral_rate)
        )

    def smoothed(self, nodes: int, neutral_rate: float = 1.0) -> tuple[float, float]:
        """(samples/s, standard deviation) at ``nodes`` for the allocator: the law's where the law
        holds, else :meth:`estimate`.
        """
        rate, std = self.estimate(nodes, neutral_rate)
        if nodes < 1 or not self._law_holds:
            return rate, std
        by_law = self._law.rate(nodes)
        relative = (
            self._law.relative_std(nodes)
            if self.at(nodes) is not None
            else std / rate
            if rate > 0
            else 0.0
        )
        return by_law, by_law * relative

    def _between(self, nodes: int, low: Point, high: Point) -> tuple[float, float]:
        to_low, to_high = math.log2(nodes / low.nodes), math.log2(high.nodes / nodes)
        share = to_low / (to_low + to_high)
        if low.rate <= 0 or high.rate <= 0:
            # One end gives nothing: somewhere between, the curve falls to 0, and nobody knows
            # where.
            rate = low.rate + (high.rate - low.rate) * (nodes - low.nodes) / (
                high.nodes - low.nodes
            )
            return rate, rate / 2
        if self.prior is None:
            rate = amdahl(nodes, low.nodes, low.rate, high.nodes, high.rate)
        else:
            ratio_low, ratio_high = (
                low.rate / self.prior.rate(low.nodes),
                high.rate / self.prior.rate(high.nodes),
            )
            rate = self.prior.rate(nodes) * ratio_low ** (1 - share) * ratio_high**share
            rate = min(max(rate, min(low.rate, high.rate)), max(low.rate, high.rate))
        ends = ((1 - share) * low.relative_std) ** 2 + (share * high.relative_std) ** 2
        bridge = self._roughness**2 * to_low * to_high / (to_low + to_high)
        return rate, rate * _bounded(ends + bridge)

    def _outside(self, nodes: int, edge: Point) -> tuple[float, float]:
        distance = abs(math.log2(nodes / edge.nodes))
        walk = self._roughness**2 * distance
        if self.prior is not None:
            return _by_prior(self.prior, nodes, edge, walk)
        rate = edge.rate * self._law.rate(nodes) / self._law.rate(edge.nodes)
        return rate, rate * _bounded(self._law.relative_std(nodes) ** 2 + walk)

    def _beyond_nothing(self, nodes: int, edge: Point, neutral_rate: float) -> tuple[float, float]:
        """Next to a size that gave nothing: above it nothing either, below it nobody knows."""
        if nodes > edge.nodes:
            return 0.0, 0.0
        known = [(p.nodes, p.rate, p.relative_std) for p in self.points if p.rate > 0]
        suggested = (
            self.prior.rate(nodes) if self.prior is not None else neutral(nodes, neutral_rate)
        )
        rate = fit(known).rate(nodes) if known else suggested
        return rate, UNKNOWN_STD * rate

    @cached_property
    def _law(self) -> AlphaBeta:
        return fit([(p.nodes, p.rate, p.relative_std) for p in self.points if p.rate > 0])

    @cached_property
    def _law_holds(self) -> bool:
        """Whether the points lie off the law by no more than their own errors."""
        count = len(self.points)
        if (
            self.prior is not None
            or count < _LAW_POINTS
            or any(p.rate <= 0 or p.variance <= 0 for p in self.points)
        ):
            return False
        off = sum(
            ((p.rate / self._law.rate(p.nodes) - 1) / p.relative_std) ** 2 for p in self.points
        )
        return off <= count + _LAW_SIGMAS * math.sqrt(2 * count)

    @cached_property
    def _roughness(self) -> float:
        """Per √octave: that of the prior's shape, or the usual one, corrected by how far each inner
        point lies off its two neighbours.
        """
        if self.prior is not None:
            return self.prior.shape_std
        known = [p for p in self.points if p.rate > 0]
        total, count = _ROUGHNESS_WEIGHT * ROUGHNESS**2, _ROUGHNESS_WEIGHT
        for low, middle, high in zip(known, known[1:], known[2:], strict=False):
            to_low, to_high = (
                math.log2(middle.nodes / low.nodes),
                math.log2(high.nodes / middle.nodes),
            )
            share = to_low / (to_low + to_high)
            off = math.log(
                middle.rate / amdahl(middle.nodes, low.nodes, low.rate, high.nodes, high.rate)
            )
            noise = (
                middle.relative_std**2
                + ((1 - share) * low.relative_std) ** 2
                + (share * high.relative_std) ** 2
            )
            total += max(0.0, off**2 - noise) * (to_low + to_high) / (to_low * to_high)
            count += 1
        return math.sqrt(total / count)


def _by_prior(prior: Prior, nodes: int, edge: Point, walk: float) -> tuple[float, float]:
    """(samples/s, standard deviation) at ``nodes``, outside what was measured, of which ``edge`` is
    the next: the shape of the prior from there. ``walk``: relative variance of a shape over so
    many octaves.

    Where the one it comes from never ran at the edge's size, its shape is a guess there, and its
    level may tell more: the mean of the two logarithms by precision.
    """
    here, there = prior.own_std(nodes) ** 2, prior.own_std(edge.nodes) ** 2
    shape, level = edge.relative_std**2 + walk + there, prior.level_std**2
    share = shape / (shape + level) if there else 0.0
    by_shape = edge.rate * prior.rate(nodes) / prior.rate(edge.nodes)
    rate = by_shape ** (1 - share) * prior.rate(nodes) ** share
    return rate, rate * _bounded(here + (1 - share) * shape)


def _bounded(variance: float) -> float:
    """The standard deviation, at most ``_MOST_STD``: beyond, nothing is known anyway."""
    return min(math.sqrt(variance), _MOST_STD)


def amdahl(nodes: int, low: int, low_rate: float, high: int, high_rate: float) -> float:
    """Throughput at ``nodes`` on the curve 1/rate = s0 + s1/k through two sizes, samples/s. Between
    them it lies between the two rates.
    """
    share = (1 / nodes - 1 / low) / (1 / high - 1 / low)
    return 1 / (1 / low_rate + share * (1 / high_rate - 1 / low_rate))


def neutral(nodes: int, rate_per_node: float) -> float:
    """The curve of a job about which nothing is known, samples/s: ``rate_per_node * nodes**0.9``,
    6.7 % less per node and doubling.
    """
    return rate_per_node * float(nodes**0.9)


def _outside(nodes: int, points: Sequence[tuple[int, float]]) -> float:
    """Octaves by which ``nodes`` lies outside the range of ``points``; 0 inside."""
    low, high = points[0][0], points[-1][0]
    if nodes < low:
        return math.log2(low / nodes)
    return math.log2(nodes / high) if nodes > high else 0.0
