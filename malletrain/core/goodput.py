"""What nodes are worth to a job whose global batch follows the gradient noise
(:class:`malletrain.AdaptiveBatch`), and which batch suits them.

Decides the batch at each scale and the value of the scale: the one with the highest goodput, which
is the throughput times the statistical efficiency of its samples, as Pollux defines it (Qiao et
al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", OSDI 2021,
sections 3.1 and 4.1). The unit is a sample at the owner's base batch: a larger batch processes more
samples per second, and each of them brings the training less far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from allocator import ScalingCurve

MAX_BATCH = 2**40
"""Largest batch that is believed, samples."""
MIN_ADVANTAGE = 1.05
"""Minimum ratio of goodput for which a batch is changed."""


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

    def after(self, before: BatchState | None) -> BatchState:
        """Return this state, with the noise of the state ``before`` it if it has none. A script
        reports its batch when it changes, and the noise from time to time.
        """
        if before is None or self.most is not None:
            return self
        return replace(before, base=self.base, current=self.current)

    @property
    def follows_noise(self) -> bool:
        """Whether the job changes its batch by the noise scale, which is known."""
        return self.most is not None and self.noise_scale is not None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batches that the job may choose: the base, doubled up to ``most``, and ``most``."""
        sizes = [self.base]
        while 2 * sizes[-1] < (self.most or 0):
            sizes.append(2 * sizes[-1])
        return tuple(sorted({*sizes, max(self.base, self.most or 0)}))

    def efficiency(self, batch: int) -> float:
        """Return the statistical efficiency of ``batch``; 1 without a noise scale."""
        if self.noise_scale is None:
            return 1.0
        return statistical_efficiency(batch, self.base, self.noise_scale)


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


Gain = Callable[[int, float], float]
"""(nodes, batch relative to the present one) → throughput with that batch relative to that with the
present one.
"""


def best_batch(nodes: int, state: BatchState, gain: Gain) -> tuple[int, float]:
    """Return the batch with the highest goodput.

    Args:
        nodes: number of nodes.
        state: what the job reports of its batch.
        gain: throughput at other batches.

    Returns:
        (batch, its goodput relative to the throughput with the present batch). The present batch
        stays unless another one is better by :data:`MIN_ADVANTAGE`.
    """

    def worth(batch: int) -> float:
        return gain(nodes, batch / state.current) * state.efficiency(batch)

    present, best = worth(state.current), max(state.sizes, key=worth)
    stays = state.base <= state.current <= (state.most or state.base)
    if stays and worth(best) < MIN_ADVANTAGE * present:
        return state.current, present
    return best, worth(best)


def goodput(curve: ScalingCurve, state: BatchState, gain: Gain | None) -> ScalingCurve:
    """Return the goodput of a job at the batch that suits each scale.

    Args:
        curve: throughput at the present batch, samples/s.
        state: what the job reports of its batch.
        gain: throughput at other batches; None if it is unknown, so that the job keeps its batch.

    Returns:
        Samples of the base batch per second by scale; ``curve`` itself if the job's batch does not
        follow the noise.
    """
    if not state.follows_noise:
        return curve
    if gain is None:
        efficiency = state.efficiency(state.current)
        return ScalingCurve.of((k, rate * efficiency) for k, rate in curve.points)
    return ScalingCurve.of((k, rate * best_batch(k, state, gain)[1]) for k, rate in curve.points)
