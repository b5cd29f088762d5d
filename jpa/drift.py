"""Drift detection: a two-sided CUSUM on the standardised residuals of the throughput at one size.

Decides when a series of observations no longer fits its mean. It does not decide what follows
(:mod:`jpa.curve` turns the old curve into a prior).

Page, "Continuous inspection schemes", Biometrika 41, 1954; Montgomery, "Introduction to Statistical
Quality Control", chapter 9: S⁺ ← max(0, S⁺ + z − k), S⁻ ← max(0, S⁻ − z − k), alarm when either
exceeds h. With k = 0.5 and h = 8 Siegmund's approximation gives one false alarm per side in about
19,000 observations.
"""

from __future__ import annotations

from dataclasses import dataclass

ALLOWANCE = 0.5
"""k, standard deviations: the scheme is designed for shifts of at least twice this."""
DECISION_INTERVAL = 8.0
"""h, standard deviations."""
MAX_RESIDUAL = 3.0
"""Residuals are clipped here, standard deviations. A single stalled window raises no alarm: it
takes four in a row.
"""


@dataclass(frozen=True)
class Side:
    """One of the two cumulative sums, and the observations since it was last 0."""

    total: float = 0.0
    """The cumulative sum, standard deviations."""
    count: int = 0
    """Number of observations."""
    sum: float = 0.0
    """Sum of the observations, samples/s."""
    before: float = 0.0
    """The mean before them, samples/s."""


@dataclass(frozen=True)
class Cusum:
    """The state of the detection at one size."""

    high: Side = Side()
    """S⁺, for an increase."""
    low: Side = Side()
    """S⁻, for a decrease."""


@dataclass(frozen=True)
class Shift:
    """A lasting change of the throughput."""

    before: float
    """The mean before it began, samples/s."""
    after: float
    """The mean of the observations since, samples/s."""


def clip(residual: float) -> float:
    """Return ``residual`` (standard deviations) within ±``MAX_RESIDUAL``."""
    return max(-MAX_RESIDUAL, min(MAX_RESIDUAL, residual))


def step(state: Cusum, observation: float, mean: float, std: float) -> tuple[Cusum, Shift | None]:
    """Process one observation.

    Args:
        state: the sums so far.
        observation: samples/s.
        mean: the expected observation, samples/s.
        std: its standard deviation, samples/s.

    Returns:
        The new state, and the shift if there is an alarm. After an alarm the state is reset.
    """
    z = clip((observation - mean) / std)
    high = _updated(state.high, z, observation, mean)
    low = _updated(state.low, -z, observation, mean)
    for side in (high, low):
        if side.total > DECISION_INTERVAL:
            return Cusum(), Shift(side.before, side.sum / side.count)
    return Cusum(high, low), None


def _updated(side: Side, z: float, observation: float, mean: float) -> Side:
    total = max(0.0, side.total + z - ALLOWANCE)
    if total == 0:
        return Side()
    before = side.before if side.count else mean
    return Side(total, side.count + 1, side.sum + observation, before)
