"""EarlyCurve: predicts the rest of a learning curve from its beginning, in stages. Pure; needs
numpy and scipy, nothing else of MalleTrain.

SpotTune (Li et al., ICDCS 2020, section IV) fits the curve of a metric to be minimised by

    m(k) = 1 / (a0 k² + a1 k + a2) + a3,    a0, a1 ≥ 0, a2 > 0,

separately in each stage. A stage begins when the learning rate changes, and k counts from there.
For a metric to be maximised, its negative is fitted. The effect of a later change of the learning
rate is not predicted.

Decides where stages begin, if they are not given, and the interval of a prediction.
:mod:`malletrain.sweep.pruner` decides what follows for a trial.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

try:
    from scipy.optimize import least_squares
    from scipy.special import stdtrit
except ImportError:
    raise ImportError(
        "EarlyCurve needs scipy, which is not installed here: "
        "pip install --find-links WHEELS 'malletrain[sweep]'."
    ) from None

Array = Any  # numpy.ndarray of any dtype

MIN_STAGE_POINTS = 4
"""Minimum number of points of a stage before the next stage is looked for: the number of parameters
of the law."""
MIN_FIT_POINTS = 3
"""Minimum number of points of a stage for a fit. Three points are fitted with a0 = 0, without an
estimate of the error."""
MIN_JUMP_RATIO = 4.0
"""Minimum ratio of a step towards the goal to the largest recent step, at which a new stage
begins."""
MIN_VALUE = 1e-9


@dataclass(frozen=True)
class Prediction:
    """Predicted value of a curve at one step."""

    value: float
    """Value at the requested step."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""
    stages: tuple[int, ...]
    """The steps at which stages begin, including the first."""


@dataclass(frozen=True)
class Law:
    """One stage's fit: :math:`1 / (a0 k² + a1 k + a2) + a3`."""

    a0: float
    a1: float
    a2: float
    a3: float

    def at(self, k: float) -> float:
        """Return the metric ``k`` steps after the beginning of the stage."""
        return 1.0 / (self.a0 * k * k + self.a1 * k + self.a2) + self.a3


class EarlyCurve:
    """Predicts learning curves.

    Args:
        direction: whether the metric is to be minimised or maximised.
        stages: steps at which the learning rate changes; None: they are detected.
        bounds: range of possible values of the metric, such as (0, 1) for an accuracy.
        confidence: fraction of predictions whose interval is to contain the true value.
    """

    def __init__(
        self,
        direction: Literal["minimize", "maximize"] = "minimize",
        stages: Sequence[int] | None = None,
        bounds: tuple[float, float] = (-math.inf, math.inf),
        confidence: float = 0.9,
    ) -> None:
        if direction not in ("minimize", "maximize"):
            raise ValueError(f'direction is "minimize" or "maximize", not {direction!r}.')
        if not 0 < confidence < 1:
            raise ValueError(f"confidence is a share between 0 and 1, not {confidence!r}.")
        self.confidence = confidence
        self._sign = 1.0 if direction == "minimize" else -1.0
        self._fixed_stages = None if stages is None else sorted(stages)
        low, high = (bounds[0], bounds[1]) if self._sign > 0 else (-bounds[1], -bounds[0])
        self._low, self._high = low, high

    def predict(self, steps: Sequence[int], values: Sequence[float], at: int) -> Prediction | None:
        """Return the prediction for step ``at``; None if the newest stage is too short, or a value
        is not finite.

        Args:
            steps: increasing step numbers.
            values: the metric at each step.
            at: a step after the last.
        """
        k = np.asarray(steps, dtype=float)
        y = self._sign * np.asarray(values, dtype=float)
        if len(k) != len(y) or np.any(np.diff(k) <= 0):
            raise ValueError("Give as many values as steps, and steps that increase.")
        if not np.all(np.isfinite(y)):
            return None
        begins = self._stages(k, y)
        first = begins[-1]
        newest_k, newest_y = k[first:] - k[first], y[first:]
        if len(newest_k) < MIN_FIT_POINTS:
            return None
        value, half = self._extrapolated(newest_k, newest_y, at - k[first])
        ends = sorted(
            self._sign * min(max(v, self._low), self._high)
            for v in (value - half, value, value + half)
        )
        stages = tuple(int(k[i]) for i in begins)
        low, value, high = map(float, ends)
        return Prediction(value, low, high, stages)

    def fit(self, steps: Sequence[int], values: Sequence[float]) -> Law:
        """Return the law of one stage; ``steps`` count from its beginning. For a metric to be
        maximised it is the law of its negative.
        """
        k, y = np.asarray(steps, dtype=float), self._sign * np.asarray(values, dtype=float)
        scale_k, scale_y, solution = self._fitted(k, y)
        a0, a1, a2, a3 = solution.x
        return Law(
            a0 / scale_y / scale_k**2, a1 / scale_y / scale_k, a2 / scale_y, a3 * scale_y + y.min()
        )

    # --- stages ---

    def _stages(self, k: Array, y: Array) -> list[int]:
        """Return the indices at which stages begin."""
        if self._fixed_stages is not None:
            inner = (int(np.searchsorted(k, step)) for step in self._fixed_stages)
            return sorted({0, *(i for i in inner if 0 < i < len(k))})
        begins = [0]
        falls = -np.diff(y)
        for i in range(MIN_STAGE_POINTS, len(falls)):
            before = falls[max(begins[-1], i - MIN_STAGE_POINTS) : i]
            if i + 1 - begins[-1] < MIN_STAGE_POINTS or len(before) < MIN_STAGE_POINTS - 1:
                continue
            # Within a stage the falls become smaller; noise is symmetric.
            largest_recent = max(float(np.max(np.abs(before))), MIN_VALUE * (1 + abs(y[i])))
            if falls[i] > MIN_JUMP_RATIO * largest_recent:
                begins.append(i + 1)
        return begins

    # --- fits ---

    def _fitted(self, k: Array, y: Array) -> tuple[float, float, Any]:
        """Return the scales of steps and values, and scipy's solution in these scales, with values
        relative to the smallest.
        """
        scale_k = float(k[-1]) or 1.0
        scale_y = float(y.max() - y.min()) or 1.0
        x, z = k / scale_k, (y - y.min()) / scale_y
        floor = (self._low - y.min()) / scale_y
        floor = max(floor, -10.0)  # far below all observed values
        bent = np.inf if len(k) > MIN_FIT_POINTS else MIN_VALUE

        def residuals(a: Array) -> Array:
            return 1.0 / (a[0] * x * x + a[1] * x + a[2]) + a[3] - z

        def slopes(a: Array) -> Array:
            d = -1.0 / (a[0] * x * x + a[1] * x + a[2]) ** 2
            return np.stack([d * x * x, d * x, d, np.ones_like(x)], axis=1)

        best: Any = None
        for a0, a1, a3 in ((0.1, 1.0, -0.1), (5.0, 5.0, -0.01), (0.1, 20.0, -0.3)):
            start = np.array(
                [min(a0, bent / 2), a1, 1.0 / max(z[0] - a3, 0.05), max(a3, floor / 2)]
            )
            solution = least_squares(
                residuals,
                start,
                slopes,
                bounds=([0.0, 0.0, MIN_VALUE, min(floor, -MIN_VALUE)], [bent, np.inf, np.inf, 1.0]),
                x_scale=np.maximum(np.abs(start), 0.1),
                max_nfev=300,
            )
            if best is None or solution.cost < best.cost:
                best = solution
        return scale_k, scale_y, best

    def _extrapolated(self, k: Array, y: Array, at: float) -> tuple[float, float]:
        """Return the value at ``at`` and half the width of its interval, by the delta method."""
        scale_k, scale_y, solution = self._fitted(k, y)
        x = at / scale_k
        a0, a1, a2, a3 = solution.x
        under = a0 * x * x + a1 * x + a2
        value = (1.0 / under + a3) * scale_y + float(y.min())
        spare = len(k) - len(solution.x)
        if spare < 1:
            return value, math.inf
        variance = 2 * solution.cost / spare
        slope = np.array([-x * x, -x, -1.0, under**2]) / under**2
        free = ~(solution.active_mask != 0)
        free[3] = True
        jac, slope = solution.jac[:, free], slope[free]
        covariance = np.linalg.pinv(jac.T @ jac, rcond=1e-12) * variance
        spread = math.sqrt(max(float(slope @ covariance @ slope) + variance, 0.0))
        half = float(stdtrit(spare, 0.5 + self.confidence / 2)) * spread
        return value, half * scale_y
