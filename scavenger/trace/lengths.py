"""Distributions of gap lengths for synthetic traces: log-normal, or any histogram."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from scavenger.trace.checks import FloatArray, TraceError

GRID = np.linspace(-7.0, 7.0, 2801)
"""Values of a standard normal variable."""
DENSITY = np.exp(-0.5 * GRID**2) / math.sqrt(2 * math.pi) * (GRID[1] - GRID[0])
"""Probability of each value of :data:`GRID`."""
_NORMAL = NormalDist()
_PHI = np.array([_NORMAL.cdf(float(z)) for z in GRID])


@dataclass(frozen=True, eq=False)
class Lengths:
    """A distribution of gap lengths, as a function of a standard normal variable. ``log_s`` (K,):
    natural logarithms of seconds on a fixed grid.

    Sampling through a normal variable allows correlated lengths within a batch for any distribution
    (a Gaussian copula).
    """

    log_s: FloatArray

    def at(self, z: npt.ArrayLike) -> FloatArray:
        """Return lengths in seconds for standard normal ``z``."""
        return np.exp(np.interp(np.asarray(z, dtype=np.float64), GRID, self.log_s))

    @property
    def mean_s(self) -> float:
        """Expected length, seconds."""
        return float((np.exp(self.log_s) * DENSITY).sum())

    @property
    def median_s(self) -> float:
        """Median length, seconds."""
        return float(self.at(0.0))


def lognormal(median_s: float, mean_s: float, minimum_s: float = 0.0) -> Lengths:
    """Return log-normal lengths with this median and mean; with ``minimum_s``, only the part of the
    distribution above it.

    mu = ln(median), sigma² = 2·ln(mean/median). Summit's 475 s and 1,192 s give sigma = 1.36 and,
    as a check, 57 % below 600 s (measured: 56 %).

    Args:
        median_s: median length, seconds.
        mean_s: mean length, seconds.
        minimum_s: minimum length, seconds.
    """
    if not 0 < median_s < mean_s:
        raise TraceError(
            "synth",
            [
                f"A log-normal length needs 0 < median < mean; got median {median_s:g} s, mean "
                f"{mean_s:g} s."
            ],
        )
    mu, sigma = math.log(median_s), math.sqrt(2.0 * math.log(mean_s / median_s))
    if minimum_s <= 0:
        return Lengths(mu + sigma * GRID)
    below = _NORMAL.cdf((math.log(minimum_s) - mu) / sigma)
    u = np.clip(below + (1.0 - below) * _PHI, 1e-15, 1.0 - 1e-15)
    return Lengths(mu + sigma * np.array([_NORMAL.inv_cdf(float(x)) for x in u]))


def histogram(edges_s: Sequence[float], weights: Sequence[float]) -> Lengths:
    """Return lengths by a histogram: ``weights`` (B,) of the bins between ``edges_s`` (B+1,)
    seconds, log-uniform within a bin.

    An edge of 0 counts as 1 s, and an infinite last edge as four times the previous one.
    """
    edges = [float(e) for e in edges_s]
    w = np.asarray(weights, dtype=np.float64)
    if edges and edges[0] == 0:
        edges[0] = min(1.0, edges[1] / 2) if len(edges) > 1 else 1.0
    if len(edges) > 1 and math.isinf(edges[-1]):
        edges[-1] = 4.0 * edges[-2]
    if len(edges) != len(w) + 1 or len(w) == 0 or min(np.diff(edges)) <= 0 or edges[0] < 0:
        raise TraceError(
            "synth", ["A histogram of lengths needs rising edges, one more than weights."]
        )
    if not np.isfinite(w).all() or w.min() < 0 or w.sum() <= 0:
        raise TraceError(
            "synth", ["The weights of a histogram of lengths must be 0 or more, and not all 0."]
        )
    cumulative = np.concatenate([[0.0], np.cumsum(w) / w.sum()])
    return Lengths(np.interp(_PHI, cumulative, np.log(edges)))
