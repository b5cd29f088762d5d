"""Scaling curves: throughput of one job by scale.

Decides how a curve is checked, interpolated and extrapolated. It does not measure throughput
(:mod:`jpa`) and does not value it (:mod:`allocator.valuation`).
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
    """A scaling curve is invalid; the message says which point and why."""


class ScalingCurve:
    """Throughput by scale, piecewise linear between measured points.

    Args:
        points: ``((nodes, samples per second), ...)``, strictly increasing in nodes, at least one
            point. Throughputs are finite and not negative; ``nodes >= 1``. The throughput at 0
            nodes is 0.

    Below the first point the curve runs linearly to (0, 0). Beyond the last point :meth:`at`
    returns the last throughput, so that a job gets no credit for speed that was never measured;
    :meth:`covers` tells whether a size is within the points.

    Curves are immutable: do not write to their arrays.

    Raises:
        CurveError: if the curve is empty, not sorted, negative or not finite.
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
                    f"The scaling curve lists {b} nodes after {a}; sort it by nodes and list "
                    "each size once."
                )

    def __repr__(self) -> str:
        return f"ScalingCurve(points={self.points!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ScalingCurve):
            return NotImplemented
        return self is other or all(map(np.array_equal, self.arrays, other.arrays))

    @cached_property
    def _hash(self) -> int:
        sizes, rates = self.arrays
        return hash((len(sizes), (rates + 0.0).tobytes()))  # 0.0 and -0.0 are equal

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {"points": self.points}  # without the hash, which is valid in this process only

    @classmethod
    def of(cls, points: Mapping[int, float] | Iterable[tuple[int, float]]) -> ScalingCurve:
        """Return a curve from a mapping or pairs in any order."""
        pairs = points.items() if isinstance(points, Mapping) else points
        return cls(tuple(sorted((int(n), float(r)) for n, r in pairs)))

    @classmethod
    def from_arrays(
        cls, sizes: npt.NDArray[np.int64], rates: npt.NDArray[np.float64]
    ) -> ScalingCurve:
        """Return a curve from arrays, which it takes over and makes read-only. It is for plans that
        make hundreds of curves; :attr:`points` is computed on first use.

        Args:
            sizes: nodes, strictly increasing.
            rates: throughput at each size, samples/s.

        Raises:
            CurveError: as the constructor.
        """
        sizes_valid = len(sizes) and sizes[0] >= 1 and (sizes[1:] > sizes[:-1]).all()
        if not (sizes_valid and rates.min() >= 0 and rates.max() < math.inf):
            return cls(_pairs(sizes, rates))  # raises with the reason
        curve = object.__new__(cls)
        sizes.flags.writeable = rates.flags.writeable = False
        curve.arrays = sizes, rates
        return curve

    @cached_property
    def points(self) -> tuple[tuple[int, float], ...]:
        """``((nodes, samples per second), ...)``."""
        return _pairs(*self.arrays)

    @cached_property
    def best_rate_per_node(self) -> float:
        """The highest throughput per node at any point, samples/s."""
        sizes, rates = self.arrays
        return float((rates / sizes).max())

    @cached_property
    def useful(self) -> int:
        """The smallest size with the highest throughput, nodes; 0 if no size has any."""
        sizes, rates = self.arrays
        best = int(rates.argmax())
        return int(sizes[best]) if rates[best] > 0 else 0

    @property
    def largest(self) -> int:
        """The size of the last point, nodes."""
        return int(self.arrays[0][-1])

    def covers(self, nodes: int) -> bool:
        """Return whether the throughput at ``nodes`` needs no extrapolation."""
        return 0 <= nodes <= self.largest

    def at(self, nodes: int) -> float:
        """Return the throughput at ``nodes``, samples/s: linear between points, constant beyond the
        last.
        """
        if nodes <= 0:
            return 0.0
        sizes, rates = self.arrays
        if nodes >= sizes[-1]:
            return rates.item(-1)
        right = int(sizes.searchsorted(nodes))
        size, rate = sizes.item(right), rates.item(right)
        before = (sizes.item(right - 1), rates.item(right - 1)) if right else (0, 0.0)
        return before[1] + (nodes - before[0]) / (size - before[0]) * (rate - before[1])

    @cached_property
    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """(nodes, samples/s) of the points, as read-only arrays."""
        sizes, rates = zip(*self.points, strict=True)
        arrays = np.array(sizes, dtype=np.int64), np.array(rates, dtype=np.float64)
        for array in arrays:
            array.flags.writeable = False
        return arrays

    @cached_property
    def knots(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The knots of the interpolation: (0, 0) and the points. Do not write to them."""
        sizes, rates = self.arrays
        return np.concatenate(([0.0], sizes)), np.concatenate(([0.0], rates))

    def rates(
        self, sizes: npt.NDArray[np.integer] | npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Return :meth:`at` for an array of sizes of any shape, samples/s."""
        nodes, rates = self.knots
        interpolated: npt.NDArray[np.float64] = np.interp(sizes, nodes, rates)
        return interpolated


class CurveTable:
    """Many curves, evaluated together. The results equal :meth:`ScalingCurve.rates` to the last
    bit.
    """

    def __init__(self, curves: Sequence[ScalingCurve]) -> None:
        knots = [curve.knots for curve in curves]
        lengths = np.array([len(sizes) for sizes, _ in knots], dtype=np.int64)
        self._sizes = np.concatenate([sizes for sizes, _ in knots])
        self._rates = np.concatenate([rates for _, rates in knots])
        ends = lengths.cumsum()
        slopes = np.zeros(len(self._sizes))
        slopes[:-1] = np.diff(self._rates) / np.diff(self._sizes)
        slopes[ends - 1] = 0.0  # constant beyond the last point
        self._slopes = slopes
        self._stride = int(self._sizes[ends - 1].max()) + 1
        curve_of_knot = np.arange(len(knots)).repeat(lengths)
        self._keys = self._sizes.astype(np.int64) + self._stride * curve_of_knot

    def rates(
        self, curve_index: npt.NDArray[np.int64], sizes: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Return the throughput at each of ``sizes``, samples/s.

        Args:
            curve_index: which curve to read, for each size.
            sizes: nodes, 0 or more, not necessarily whole.
        """
        # Points are at whole sizes, so the whole part of a size determines its segment.
        whole = np.minimum(sizes, self._stride - 1).astype(np.int64)
        segment = self._keys.searchsorted(whole + self._stride * curve_index, side="right") - 1
        rates: npt.NDArray[np.float64] = (
            self._slopes[segment] * (sizes - self._sizes[segment]) + self._rates[segment]
        )
        return rates


def _pairs(
    sizes: npt.NDArray[np.int64], rates: npt.NDArray[np.float64]
) -> tuple[tuple[int, float], ...]:
    return tuple(zip(sizes.tolist(), rates.tolist(), strict=True))
