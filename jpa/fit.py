"""The α-β law of one job: its time as the sum of compute and communication.

Decides the estimate at a size or a batch without a measurement, and its uncertainty, from a few
measured ones. It does not decide which sizes to measure (:mod:`jpa.profile`) and when to use which
form of the law (:mod:`jpa.phase` at one batch, :mod:`jpa.curve` over batches).

At one batch, with ``w(k) = k / rate(k)`` (node-seconds per sample at ``k`` nodes), the law is

    w(k) = a + b·(k−1)/k + c·log2 k + d·(k−1),        a > 0;  b, c, d ≥ 0

The terms are those of the α-β (latency, bandwidth) cost of an all-reduce among k members: Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA
19(1), 2005, section 4; Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69(2),
2009. They are per sample, so that one law covers both ways of scaling a job:

* batch per node B fixed: a step of k·B samples takes B·w(k): compute ``a``; bandwidth of a ring or
  of Rabenseifner's algorithm, ∝ (k−1)/k, ``b``; latency of a tree, ∝ log2 k, ``c``; latency of a
  ring, ∝ k−1, ``d``;
* global batch G fixed: a step of G samples takes G·w(k)/k: compute ``a/k`` (Amdahl's parallel part)
  and bandwidth ∝ (k−1)/k, ``d``.

All terms but ``a`` only lower the efficiency of a node as nodes are added, so the law never
predicts super-linear speedup.

At any batch, a step of ``m`` samples on ``k`` nodes takes

    τ(k, m) = a + b·m/k + c·(k−1)/k + d·log2 k + e·(k−1),       b > 0;  a, c, d, e ≥ 0

seconds: a part of each step that does not depend on its samples (``a``: kernel launches, the
optimizer's update), the computation on the samples of one node (``b``), and an all-reduce of the
gradients, whose bytes do not depend on the batch: bandwidth (``c``), latency of a tree (``d``) and
of a ring (``e``). Pollux (Qiao et al., OSDI 2021, section 3.2) models a step by the same two parts.
At one batch ``a``, ``b·m`` and ``c`` cannot all be told apart, because (k−1)/k = 1 − 1/k: the wide
prior decides, and the uncertainty at another batch says so. A measurement at a second batch does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

# The prior of the coefficients: mean and standard deviation of each term's share of w at the
# largest measured size. It is wide: a job may be all compute or nearly all communication.
# tests/jpa/test_fit.py checks it against measured curves and an analytic family.
_PRIOR_MEAN = (0.6, 0.05, 0.05, 0.2)
_PRIOR_STD = (1.0, 0.2, 0.2, 1.0)
_MIN_COMPUTE_SHARE = 0.02
"""Lower bound on the share of compute in w at the largest measured size. It keeps w(k) above 0 in
extrapolations to smaller sizes.
"""
_LAW_STD = 0.02
"""Relative standard deviation of real curves from the law: about 2 %."""
# The prior of the coefficients: mean and standard deviation of each term's share of the step time
# at the largest measured size.
_STEP_PRIOR_MEAN = (0.1, 0.6, 0.15, 0.05, 0.05)
_STEP_PRIOR_STD = (0.5, 1.0, 0.5, 0.2, 0.2)
_MIN_SAMPLES_SHARE = 0.02
"""Lower bound on the share of the computation on samples in the step time at that size."""


@dataclass(frozen=True)
class AlphaBeta:
    """A fitted law."""

    coefficients: tuple[float, float, float, float]
    """(a, b, c, d), node-seconds per sample."""
    covariance: tuple[float, ...]
    """Covariance matrix of the coefficients, row by row (16 numbers)."""

    def node_seconds(self, nodes: int) -> float:
        """Return w(k), node-seconds per sample."""
        return float(sum(c * t for c, t in zip(self.coefficients, terms(nodes), strict=True)))

    def rate(self, nodes: int) -> float:
        """Return the throughput at ``nodes``, samples/s."""
        return nodes / self.node_seconds(nodes)

    def relative_std(self, nodes: int) -> float:
        """Return the relative standard deviation of the throughput at ``nodes`` that follows from
        the uncertainty of the coefficients.
        """
        t = np.array(terms(nodes))
        cov = np.array(self.covariance).reshape(4, 4)
        return math.sqrt(max(0.0, float(t @ cov @ t))) / self.node_seconds(nodes)

    def scaled(self, compute: float, communication: float) -> AlphaBeta:
        """Return the law of another model; latency stays the same.

        Args:
            compute: its arithmetic per sample relative to this one.
            communication: its bytes per step relative to this one.
        """
        factors = np.array([compute, communication, 1.0, communication])
        cov = np.array(self.covariance).reshape(4, 4) * np.outer(factors, factors)
        a, b, c, d = (float(x) for x in np.array(self.coefficients) * factors)
        return AlphaBeta((a, b, c, d), tuple(float(x) for x in cov.ravel()))


def terms(nodes: int) -> tuple[float, float, float, float]:
    """Return the four terms of the law at ``nodes``."""
    if nodes < 1:
        raise ValueError(f"The scaling law was asked for {nodes} nodes; sizes start at 1.")
    return (1.0, (nodes - 1) / nodes, math.log2(nodes), float(nodes - 1))


def fit(points: Sequence[tuple[int, float, float]]) -> AlphaBeta:
    """Fit the law by least squares with relative weights, a wide prior and non-negative terms.

    Args:
        points: ``(nodes, samples per second, relative standard deviation)``; every throughput must
            be above 0.

    Raises:
        ValueError: if there is no point, or a throughput is not positive.
    """
    if not points:
        raise ValueError("The scaling law needs at least one measured size.")
    for nodes, rate, _ in points:
        if not (math.isfinite(rate) and rate > 0):
            raise ValueError(
                f"The scaling law cannot use throughput {rate} at {nodes} nodes; leave that "
                "size out."
            )
    return _fit(tuple(sorted((int(n), float(r), float(s)) for n, r, s in points)))


@lru_cache(maxsize=4096)
def _fit(points: tuple[tuple[int, float, float], ...]) -> AlphaBeta:
    sizes = [n for n, _, _ in points]
    w = np.array([n / r for n, r, _ in points])
    reference = w[-1]
    # Each term is divided by its value at the largest size (at least 4, so that a fit to one node
    # has a prediction for 2), and w by w there: the prior is then in shares and has no units.
    norm = np.array([1.0, *terms(max(sizes[-1], 4))[1:]])
    rows = np.array([terms(n) for n in sizes]) / norm
    y = w / reference
    # The lower bound keeps the equations well conditioned if node-seconds differ by a factor of a
    # thousand or more; no law holds there.
    sigma = np.hypot(np.array([s for _, _, s in points]), _LAW_STD) * np.maximum(y, 1e-3)
    prior = np.diag(1.0 / np.array(_PRIOR_STD) ** 2)
    weighted = rows / sigma[:, None] ** 2
    normal = weighted.T @ rows + prior
    right = weighted.T @ y + prior @ np.array(_PRIOR_MEAN)
    solution = bounded_solve(normal, right, np.array([_MIN_COMPUTE_SHARE, 0.0, 0.0, 0.0]))
    scale = reference / norm
    a, b, c, d = (float(x) for x in solution * scale)
    cov = np.linalg.inv(normal) * np.outer(scale, scale)
    return AlphaBeta((a, b, c, d), tuple(float(x) for x in cov.ravel()))


def bounded_solve(normal: np.ndarray, right: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Minimise ½xᵀHx − gᵀx over x ≥ lower by enumeration of the active sets (2ⁿ for n unknowns).

    Args:
        normal: H.
        right: g.
        lower: lower bounds of x.
    """
    best, best_value = lower, math.inf
    count = len(lower)
    for mask in range(2**count):
        free = [i for i in range(count) if mask >> i & 1]
        active = [i for i in range(count) if not mask >> i & 1]
        x = lower.copy()
        if free:
            x[free] = np.linalg.solve(
                normal[np.ix_(free, free)],
                right[free] - normal[np.ix_(free, active)] @ lower[active],
            )
        if np.any(x < lower - 1e-12):
            continue
        value = 0.5 * x @ normal @ x - right @ x
        if value < best_value:
            best, best_value = x, value
    return best


_TERMS = len(_STEP_PRIOR_MEAN)


class StepPoint(NamedTuple):
    """A measured throughput."""

    nodes: int
    """The size."""
    batch: float
    """Global batch, in any unit that is the same for all points."""
    rate: float
    """Throughput, in units of the batch per second, above 0."""
    relative_std: float
    """Relative standard deviation of the throughput."""


@dataclass(frozen=True)
class StepTimeLaw:
    """A fitted law."""

    coefficients: tuple[float, ...]
    """(a, b, c, d, e), seconds; b in seconds per unit of the batch."""
    covariance: tuple[float, ...]
    """Covariance matrix of the coefficients, row by row (25 numbers)."""

    def step_s(self, nodes: int, batch: float) -> float:
        """Return τ(k, m), seconds."""
        return float(np.dot(self.coefficients, step_terms(nodes, batch)))

    def rate(self, nodes: int, batch: float) -> float:
        """Return the throughput, in units of the batch per second."""
        return batch / self.step_s(nodes, batch)

    def relative_std(self, nodes: int, batch: float) -> float:
        """Return the relative standard deviation of the throughput that follows from the
        uncertainty of the coefficients.
        """
        t = np.array(step_terms(nodes, batch))
        cov = np.array(self.covariance).reshape(_TERMS, _TERMS)
        return math.sqrt(max(0.0, float(t @ cov @ t))) / self.step_s(nodes, batch)


def step_terms(nodes: int, batch: float) -> tuple[float, ...]:
    """Return the five terms of the law.

    Raises:
        ValueError: ``nodes`` is below 1, or ``batch`` is not above 0.
    """
    if nodes < 1 or not batch > 0:
        raise ValueError(
            f"The law of step times was asked for {nodes} nodes and a batch of {batch}; sizes "
            "start at 1, and a batch is above 0."
        )
    return (1.0, batch / nodes, (nodes - 1) / nodes, math.log2(nodes), float(nodes - 1))


def fit_steps(points: Iterable[StepPoint]) -> StepTimeLaw:
    """Fit the law by least squares with relative weights, a wide prior and non-negative terms.

    Args:
        points: measured throughputs, at any batches.

    Raises:
        ValueError: there is no point, or a throughput is not above 0.
    """
    measured = tuple(sorted(points))
    if not measured:
        raise ValueError("The law of step times needs at least one measured size.")
    for point in measured:
        if not (math.isfinite(point.rate) and point.rate > 0):
            raise ValueError(
                f"The law of step times cannot use throughput {point.rate} at {point.nodes} "
                "nodes; leave that size out."
            )
    return _fit_steps(measured)


@lru_cache(maxsize=1024)
def _fit_steps(points: tuple[StepPoint, ...]) -> StepTimeLaw:
    seconds = np.array([p.batch / p.rate for p in points])
    reference = seconds[-1]
    # Each term is divided by its value at the largest size (at least 4, so that a fit to one node
    # has a prediction for 2), and the step time by that there: the prior is then in shares.
    norm = np.array(step_terms(max(points[-1].nodes, 4), points[-1].batch))
    norm[1] = points[-1].batch / points[-1].nodes
    rows = np.array([step_terms(p.nodes, p.batch) for p in points]) / norm
    y = seconds / reference
    sigma = np.hypot([p.relative_std for p in points], _LAW_STD) * np.maximum(y, 1e-3)
    prior = np.diag(1.0 / np.array(_STEP_PRIOR_STD) ** 2)
    weighted = rows / sigma[:, None] ** 2
    normal = weighted.T @ rows + prior
    right = weighted.T @ y + prior @ np.array(_STEP_PRIOR_MEAN)
    solution = bounded_solve(normal, right, np.array([0.0, _MIN_SAMPLES_SHARE, 0.0, 0.0, 0.0]))
    scale = reference / norm
    covariance = np.linalg.inv(normal) * np.outer(scale, scale)
    return StepTimeLaw(
        tuple(float(x) for x in solution * scale), tuple(float(x) for x in covariance.ravel())
    )
