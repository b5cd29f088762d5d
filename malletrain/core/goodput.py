"""What nodes are worth to a job whose global batch follows the gradient noise
(:class:`malletrain.AdaptiveBatch`).

Decides the value of each scale: goodput, the throughput times the statistical efficiency of its
samples, as Pollux defines it (Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for
Goodput-Optimized Deep Learning", OSDI 2021, section 3.1). The unit is a sample at the owner's base
batch: a larger batch processes more samples per second, and each of them brings the training less
far. The job decides its batch; this module predicts which one the noise leads to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from allocator import ScalingCurve

MAX_BATCH = 2**40
"""Largest batch that is believed, samples."""


@dataclass(frozen=True)
class BatchState:
    """What a job reports of its global batch."""

    base: int
    """The script's global batch, samples per step."""
    current: int
    """The present global batch, samples per step."""
    most: int | None = None
    """The largest global batch to which the job raises it by itself; None if the script sets it."""
    noise_scale: float | None = None
    """Gradient noise scale, samples: a batch much larger than it wastes samples. None: unknown."""

    @property
    def follows_noise(self) -> bool:
        """Whether the job changes its batch by the noise scale, which is known."""
        return self.most is not None and self.noise_scale is not None

    @property
    def expected(self) -> int:
        """The batch to which the job goes at this noise scale: doubled while the noise scale is at
        least twice the batch, halved while it is below half of it. Doubling begins at the present
        batch, so that a noise scale between these bounds changes nothing.
        """
        if self.most is None or self.noise_scale is None:
            return self.current
        batch = self.current
        while self.noise_scale >= 2 * batch and batch < self.most:
            batch *= 2
        while self.noise_scale < batch / 2 and batch > self.base:
            batch = max(batch // 2, self.base)
        return min(batch, self.most)

    @property
    def efficiency(self) -> float:
        """Statistical efficiency of the expected batch; 1 if the job does not change it."""
        if self.noise_scale is None or not self.follows_noise:
            return 1.0
        return statistical_efficiency(self.expected, self.base, self.noise_scale)


def stated_batch(facts: Mapping[str, Any]) -> BatchState | None:
    """Return the batch that a job's agent reports; None if its facts are invalid.

    Args:
        facts: ``base`` and ``current``, ``most`` and ``noise_scale`` or None, as of
            :class:`BatchState`.
    """
    base, current, most = (facts.get(name) for name in ("base", "current", "most"))
    noise_scale = facts.get("noise_scale")
    if not (_is_size(base) and _is_size(current)):
        return None
    if not (_is_size(most) and isinstance(noise_scale, int | float) and noise_scale >= 0):
        return BatchState(base, current)
    return BatchState(base, current, max(most, base), float(noise_scale))


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_BATCH


def statistical_efficiency(batch: float, base: float, noise_scale: float) -> float:
    """Return the progress per sample at a batch, relative to that at the base batch: Pollux's
    (φ + m₀) / (φ + m).

    Args:
        batch: m, samples per step.
        base: m₀, samples per step.
        noise_scale: φ, the gradient noise scale, samples; infinite if there is only noise.

    Returns:
        1 at the base batch or with noise only; ``base / batch`` without noise.
    """
    if math.isinf(noise_scale):
        return 1.0
    return (noise_scale + base) / (noise_scale + batch)


def goodput(
    curve: ScalingCurve, batch: BatchState, gain: Callable[[int, float], float]
) -> ScalingCurve:
    """Return the goodput of a job at the batch that it is expected to have.

    Args:
        curve: throughput at the present batch, samples/s.
        batch: what the job reports of its batch.
        gain: (nodes, batch relative to the base) → throughput with that batch relative to that
            with the present one.

    Returns:
        Samples of the base batch per second by scale; ``curve`` itself if the job's batch does not
        follow the noise.
    """
    if not batch.follows_noise:
        return curve
    ratio, efficiency = batch.expected / batch.base, batch.efficiency
    return ScalingCurve.of((k, rate * gain(k, ratio) * efficiency) for k, rate in curve.points)
