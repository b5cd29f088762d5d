"""Has the throughput at one size changed for good? A two-sided CUSUM on standardised residuals.

Decides when a series of observations no longer fits its mean. It does not decide what to do about
it (:mod:`jpa.curve` keeps the old shape as a prior, the plan then re-measures what has become
uncertain).

Page, "Continuous inspection schemes", Biometrika 41, 1954; Montgomery, "Introduction to Statistical
    Quality Control", chapter 9: S⁺ ← max(0, S⁺ + z − k),   S⁻ ← max(0, S⁻ − z − k),   alarm when
    either exceeds h.
With k = 0.5 and h = 8 Siegmund's approximation gives one false alarm per side in about 19,000
observations.
"""

from __future__ import annotations

from dataclasses import dataclass

SLACK = 0.5
"""k: shifts under twice this many standard deviations are not looked for."""
THRESHOLD = 8.0
"""h, standard deviations."""
CLIP = 3.0
"""Residuals are clipped here, so that one stalled window (however long) never raises an alarm by
itself: it takes four in a row.
"""


@dataclass(frozen=True)
class Side:
    """One of the two running sums, and since it last left zero: how many observations, their sum,
    and the mean before them.
    """

    total: float = 0.0
    count: int = 0
    observed: float = 0.0
    before: float = 0.0


@dataclass(frozen=True)
class Cusum:
    """Running sums of one size."""

    high: Side = Side()
    low: Side = Side()


@dataclass(frozen=True)
class Shift:
    """A lasting change, samples/s: the mean before it began and the mean of the observations
    since.
    """

    before: float
    after: float


def clip(residual: float) -> float:
    """``residual`` (standard deviations) within ±``CLIP``."""
    return max(-CLIP, min(CLIP, residual))


def step(state: Cusum, observation: float, mean: float, std: float) -> tuple[Cusum, Shift | None]:
    """One observation later.

    Args:
        observation: samples/s.
        mean, std: what was expected of it.

    Returns:
        The new state, and the shift on an alarm. After an alarm the state starts afresh.
    """
    z = clip((observation - mean) / std)
    high, low = _moved(state.high, z, observation, mean), _moved(state.low, -z, observation, mean)
    for side in (high, low):
        if side.total > THRESHOLD:
            return Cusum(), Shift(side.before, side.observed / side.count)
    return Cusum(high, low), None


def _moved(side: Side, z: float, observation: float, mean: float) -> Side:
    total = max(0.0, side.total + z - SLACK)
    if total == 0:
        return Side()
    return Side(
        total, side.count + 1, side.observed + observation, side.before if side.count else mean
    )
