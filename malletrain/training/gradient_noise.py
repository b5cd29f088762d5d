"""The gradient noise scale, and what follows from it: a learning rate and a batch size.

Decides how the noise of gradients is estimated from norms (McCandlish et al. 2018, "An Empirical
Model of Large-Batch Training", appendix A.1), by which factor a learning rate grows with the batch
(Johnson et al. 2020, "AdaScale SGD"), and when a batch is doubled or halved. Pure: where the norms
come from is in :mod:`malletrain.training.adaptive_batch`.

Notation: G is the gradient of the whole data, Σ the covariance of the gradient of one sample. The
squared norm of a gradient over b samples has the expectation |G|² + tr Σ / b. The noise scale
tr Σ / |G|² is a number of samples: a batch well below it wastes steps, one well above it samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DECAY = 0.99
"""Factor by which an estimate loses weight per base batch of samples."""


@dataclass(frozen=True)
class Estimate:
    """Unbiased estimates from one update. Both may be negative by chance."""

    squared_gradient: float
    """|G|²."""
    noise: float
    """tr Σ, for one sample."""


def from_parts(part: float, inverse_size: float, whole: float, size: float) -> Estimate | None:
    """Return the estimate from gradients of parts of a batch; None if there is one part only.

    Args:
        part: mean squared norm of the gradients of the parts.
        inverse_size: mean of 1 / (samples of a part).
        whole: squared norm of the gradient of the whole batch.
        size: samples of the whole batch.
    """
    difference = inverse_size - 1 / size
    if difference <= 1e-9 * inverse_size:
        return None
    noise = (part - whole) / difference
    return Estimate(whole - noise / size, noise)


def from_successive(product: float, difference: float, size: float, before: float) -> Estimate:
    """Return the estimate from the gradients of two successive batches, as if the parameters were
    the same.

    Args:
        product: scalar product of the two gradients.
        difference: squared norm of their difference.
        size: samples of the second batch.
        before: samples of the first batch.
    """
    return Estimate(product, difference / (1 / size + 1 / before))


def gain(estimate: Estimate, base: float, size: float) -> float:
    """Return AdaScale's gain: the number of steps with ``base`` samples that one step with ``size``
    samples is worth. 1 without noise, ``size / base`` if there is only noise.

    Args:
        estimate: estimate of the gradient noise.
        base: samples of a base step.
        size: samples of the larger step.
    """
    noise, squared = max(0.0, estimate.noise), max(0.0, estimate.squared_gradient)
    if size <= base or noise + squared == 0:
        return 1.0
    return (noise / base + squared) / (noise / size + squared)


def next_size(size: int, base: int, most: int, noise_scale: float) -> int:
    """Return the next batch size. It doubles if the noise scale is at least twice the size, and
    halves if the noise scale is below half of it.

    Args:
        size: current size, samples.
        base: smallest size.
        most: largest size.
        noise_scale: tr Σ / |G|², samples.
    """
    if noise_scale >= 2 * size:
        return min(2 * size, most)
    if noise_scale < size / 2:
        size = min(size, max(size // 2, base))
    return min(size, most)


def next_towards(size: int, target: int) -> int:
    """Return the next batch size on the way to ``target``: at most twice and at least half of
    ``size``. All in samples.
    """
    return min(2 * size, target) if target > size else max(size // 2, target)


class NoiseAverage:
    """Exponential averages of estimates, over equally many samples at any batch size.

    Numerator and denominator are averaged separately, because their ratio is not unbiased.
    """

    def __init__(self) -> None:
        self._squared_gradient = self._noise = self._weight = 0.0

    def add(self, estimate: Estimate, batches: float) -> None:
        """Add an estimate of an update with ``batches`` times the samples of the base batch."""
        if not (math.isfinite(estimate.squared_gradient) and math.isfinite(estimate.noise)):
            return
        keep = DECAY**batches
        self._squared_gradient = (
            keep * self._squared_gradient + (1 - keep) * estimate.squared_gradient
        )
        self._noise = keep * self._noise + (1 - keep) * estimate.noise
        self._weight = keep * self._weight + (1 - keep)

    @property
    def mean(self) -> Estimate:
        """The averages; zeros without an estimate."""
        weight = self._weight or 1.0
        return Estimate(self._squared_gradient / weight, self._noise / weight)

    @property
    def scale(self) -> float:
        """The noise scale, samples; 0 without noise, infinite if there is only noise."""
        mean = self.mean
        if mean.noise <= 0:
            return 0.0
        return mean.noise / mean.squared_gradient if mean.squared_gradient > 0 else math.inf

    def state(self) -> dict[str, float]:
        """Return the averages as plain numbers."""
        return {
            "squared_gradient": self._squared_gradient,
            "noise": self._noise,
            "weight": self._weight,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self._squared_gradient = float(state["squared_gradient"])
        self._noise = float(state["noise"])
        self._weight = float(state["weight"])
