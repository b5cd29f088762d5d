"""Scaling curves: throughput of one job by scale, as the allocator sees them.

Decides how a curve is checked and how it is read between and beyond its points. It does not measure
(that is the JPA's work) and does not value (that is :mod:`allocator.valuation`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt


class CurveError(ValueError):
    """A scaling curve that cannot be used; the message says which point and why."""


class ScalingCurve:
    """Throughput by scale, piecewise linear between measured points.

    Args:
        points: ``((nodes, samples per second), ...)``, strictly increasing in nodes, at least one
            point. Throughputs are finite and not negative; ``nodes >= 1``. A scale of 0 nodes
            always has throughput 0.

    Below the first point the curve runs linearly to (0, 0). Beyond the last point nothing is known:
    :meth:`at` holds the last value (a job is never credited with speed nobody measured) and
    :meth:`covers` says so.

    Not to be written to.

    Raises:
        CurveError: on an empty, unsorted, negative or non-finite curve.
    """

    def __init__(self, points: tuple[tuple[int, float], ...]) -> None:
        self.points = points
        if not self.points:
            raise CurveError(
                "The scaling curve has no points; give at least one 'nodes: samples/s' pair."
            )
        for nodes, rate in self.points:
            if nodes < 1:
                raise CurveError(f"The scaling curve names {nodes} nodes; sizes start at 1.")
            if not math.isfinite(rate) or rate < 0:
                raise CurveError(
                    f"The scaling curve has throughput {rate} at {nodes} nodes; it must be a "
                    "finite number of samples/s, 0 or more."
                )
        for (a, _), (b, _) in pairwise(self.points):
            if b <= a:
                raise CurveError(
                    f"The scaling curve lists {b} nodes after {a}; sort it by nodes and name "
                    "each size once."
                )

    def __repr__(self) -> str:
        return f"ScalingCurve(points={self.points!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ScalingCurve):
            return NotImplemented
        return self is other or all(map(np.array_equal, self.known, other.known))

    @cached_property
    def _hash(self) -> int:
        sizes, rates = self.known
        return hash((len(sizes), (rates + 0.0).tobytes()))  # 0.0 and -0.0 are one

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {"points": self.points}  # without the hash, which is of this process only

    @classmethod
    def of(cls, points: Mapping[int, float] | Iterable[tuple[int, float]]) -> ScalingCurve:
        """A curve from a mapping or pairs in any order."""
        pairs = points.items() if isinstance(points, Mapping) else points
        return cls(tuple(sorted((int(n), float(r)) for n, r in pairs)))

    @classmethod
    def from_arrays(
        cls, sizes: npt.NDArray[np.int64], rates: npt.NDArray[np.float64]
    ) -> ScalingCurve:
        """The curve with these points, sizes increasing: :meth:`of` for arrays, for plans that make
        hundreds of curves. Pairs are made of them when somebody asks.
        """
        sound = len(sizes) and sizes[0] >= 1 and (sizes[1:] > sizes[:-1]).all()
        if not (sound and rates.min() >= 0 and rates.max() < math.inf):
            return cls(_pairs(sizes, rates))  # which says what is wrong
        made = object.__new__(cls)
        sizes.flags.writeable = rates.flags.writeable = False
        made.known = sizes, rates
        return made

    @cached_property
    def points(self) -> tuple[tuple[int, float], ...]:
        """``((nodes, samples per second), ...)``."""
        return _pairs(*self.known)

    @cached_property
    def best_yield(self) -> float:
        """The most that one node can bring, samples/s."""
        sizes, rates = self.known
        return float((rates / sizes).max())

    @property
    def largest(self) -> int:
        """The largest size with a known throughput, nodes."""
        return int(self.known[0][-1])

    def covers(self, nodes: int) -> bool:
        """Whether ``nodes`` lies within the known sizes (no extrapolation needed)."""
        return 0 <= nodes <= self.largest

    def at(self, nodes: int) -> float:
        """Throughput at ``nodes``, samples/s: linear between points, constant beyond the last."""
        if nodes <= 0:
            return 0.0
        sizes, rates = self.known
        if nodes >= sizes[-1]:
            return rates.item(-1)
        right = int(sizes.searchsorted(nodes))
        size, rate = sizes.item(right), rates.item(right)
        before = (sizes.item(right - 1), rates.item(right - 1)) if right else (0, 0.0)
        return before[1] + (nodes - before[0]) / (size - before[0]) * (rate - before[1])

    def many(self, sizes: Sequence[int]) -> list[float]:
        """Throughput at each of ``sizes``, samples/s."""
        return [self.at(k) for k in sizes]

    @cached_property
    def known(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The sizes of the points and the throughput at each; not to be written to."""
        sizes, rates = zip(*self.points, strict=True)
        found = np.array(sizes, dtype=np.int64), np.array(rates, dtype=np.float64)
        for each in found:
            each.flags.writeable = False
        return found

    @cached_property
    def knots(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The points with (0, 0) before them; not to be written to."""
        sizes, rates = self.known
        return np.concatenate(([0.0], sizes)), np.concatenate(([0.0], rates))

    def rates(
        self, sizes: npt.NDArray[np.integer] | npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Throughput at each of ``sizes`` (any shape), samples/s: :meth:`at` for arrays."""
        nodes, rates = self.knots
        found: npt.NDArray[np.float64] = np.interp(sizes, nodes, rates)
        return found


class CurveTable:
    """Many curves, read at once: what :meth:`ScalingCurve.rates` says of each, to the last bit."""

    def __init__(self, curves: Sequence[ScalingCurve]) -> None:
        knots = [curve.knots for curve in curves]
        lengths = np.array([len(sizes) for sizes, _ in knots], dtype=np.int64)
        self._sizes = np.concatenate([sizes for sizes, _ in knots])
        self._rates = np.concatenate([rates for _, rates in knots])
        ends = lengths.cumsum()
        slopes = np.zeros(len(self._sizes))
        slopes[:-1] = np.diff(self._rates) / np.diff(self._sizes)
        slopes[ends - 1] = 0.0  # beyond the last point nothing is known
        self._slopes = slopes
        self._stride = int(self._sizes[ends - 1].max()) + 1
        owners = np.arange(len(knots)).repeat(lengths)
        self._keys = self._sizes.astype(np.int64) + self._stride * owners

    def rates(
        self, which: npt.NDArray[np.int64], sizes: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Throughput of curve number ``which`` at each of ``sizes`` (0 or more; both arrays of one
        length), samples/s.
        """
        # Points are at whole sizes, so that the whole part says between which two a size lies.
        whole = np.minimum(sizes, self._stride - 1).astype(np.int64)
        at = self._keys.searchsorted(whole + self._stride * which, side="right") - 1
        found: npt.NDArray[np.float64] = (
            self._slopes[at] * (sizes - self._sizes[at]) + self._rates[at]
        )
        return found


def _pairs(
    sizes: npt.NDArray[np.int64], rates: npt.NDArray[np.float64]
) -> tuple[tuple[int, float], ...]:
    return tuple(zip(sizes.tolist(), rates.tolist(), strict=True))
