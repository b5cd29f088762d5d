"""The step time of one job as a function of its nodes and its global batch.

Decides the throughput at a batch that the job has not had yet, and its uncertainty, from the sizes
measured at other batches. It does not decide when the law is used (:mod:`jpa.curve`), and is not
used between sizes of one batch (:mod:`jpa.phase`).

A step of ``m`` samples on ``k`` nodes takes

    τ(k, m) = a + b·m/k + c·(k−1)/k + d·log2 k + e·(k−1),       b > 0;  a, c, d, e ≥ 0

seconds: a part of each step that does not depend on its samples (``a``: kernel launches, the
optimizer's update), the computation on the samples of one node (``b``), and an all-reduce of the
gradients, whose bytes do not depend on the batch: bandwidth (``c``), latency of a tree (``d``) and
of a ring (``e``); :mod:`jpa.fit` names the sources of these terms. Pollux (Qiao et al., OSDI 2021,
section 3.2) models a step by the same two parts.

At one batch ``a``, ``b·m`` and ``c`` cannot all be told apart, because (k−1)/k = 1 − 1/k: the wide
prior decides, and the uncertainty at another batch says so. A measurement at a second batch does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jpa.fit import bounded_solve

# The prior of the coefficients: mean and standard deviation of each term's share of the step time
# at the largest measured size.
_PRIOR_MEAN = (0.1, 0.6, 0.15, 0.05, 0.05)
_PRIOR_STD = (0.5, 1.0, 0.5, 0.2, 0.2)
_MIN_COMPUTE_SHARE = 0.02
"""Lower bound on the share of the computation on samples in the step time at that size."""
_LAW_STD = 0.02
"""Relative standard deviation of real step times from the law."""
_TERMS = len(_PRIOR_MEAN)


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
        return float(np.dot(self.coefficients, terms(nodes, batch)))

    def rate(self, nodes: int, batch: float) -> float:
        """Return the throughput, in units of the batch per second."""
        return batch / self.step_s(nodes, batch)

    def relative_std(self, nodes: int, batch: float) -> float:
        """Return the relative standard deviation of the throughput that follows from the
        uncertainty of the coefficients.
        """
        t = np.array(terms(nodes, batch))
        cov = np.array(self.covariance).reshape(_TERMS, _TERMS)
        return math.sqrt(max(0.0, float(t @ cov @ t))) / self.step_s(nodes, batch)


def terms(nodes: int, batch: float) -> tuple[float, ...]:
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
    return _fit(measured)


@lru_cache(maxsize=1024)
def _fit(points: tuple[StepPoint, ...]) -> StepTimeLaw:
    seconds = np.array([p.batch / p.rate for p in points])
    reference = seconds[-1]
    # Each term is divided by its value at the largest size (at least 4, so that a fit to one node
    # has a prediction for 2), and the step time by that there: the prior is then in shares.
    norm = np.array(terms(max(points[-1].nodes, 4), points[-1].batch))
    norm[1] = points[-1].batch / points[-1].nodes
    rows = np.array([terms(p.nodes, p.batch) for p in points]) / norm
    y = seconds / reference
    sigma = np.hypot([p.relative_std for p in points], _LAW_STD) * np.maximum(y, 1e-3)
    prior = np.diag(1.0 / np.array(_PRIOR_STD) ** 2)
    weighted = rows / sigma[:, None] ** 2
    normal = weighted.T @ rows + prior
    right = weighted.T @ y + prior @ np.array(_PRIOR_MEAN)
    solution = bounded_solve(normal, right, np.array([0.0, _MIN_COMPUTE_SHARE, 0.0, 0.0, 0.0]))
    scale = reference / norm
    covariance = np.linalg.inv(normal) * np.outer(scale, scale)
    return StepTimeLaw(
        tuple(float(x) for x in solution * scale), tuple(float(x) for x in covariance.ravel())
    )
