"""Corrects forecasts by the errors of past ones. Pure.

Decides by how much an interval is moved and widened so that it contains the end as often as it
claims. The errors of past forecasts include what a model leaves out (how the queue moves, which
nodes other jobs will take). The method is conformalised quantile regression (Romano et al., NeurIPS
2019), separately for the median and for each end of the interval, on the logarithm of the time to
the end.

The first forecast of each job counts. For a job that has not ended only a lower bound of its time
is known; without such jobs the shortest ones would dominate. They enter as censored observations
(Kaplan and Meier, 1958).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from malletrain.core.forecast import Floats, Forecast

MAX_ENDED_JOBS = 200
"""Maximum number of ended jobs that are remembered."""
BOUND_FRACTIONS = (0.1, 0.5, 0.9)
"""Fractions of all ends that should lie below the low end of an interval, the forecast itself, and
the high end.
"""
INITIAL_FACTORS = (0.8, 1.0, 2.0)
"""Factors on a model's times to the low end, the forecast and the high end, until a job has ended.
"""
INITIAL_FACTORS_WEIGHT = 10
"""Number of ended jobs that weigh as much as :data:`INITIAL_FACTORS`."""


class Made(NamedTuple):
    """The first forecast of a job, uncorrected. Times on the shell's clock."""

    at: float
    low: float
    end: float
    high: float


class Ended(NamedTuple):
    """A first forecast and the end of its job."""

    made: Made
    at: float
    done: bool
    """Whether the job completed; else it ended early, for example because it was cancelled."""


class PastForecasts:
    """The first forecasts of one controller's jobs, and the ends of these jobs."""

    def __init__(self) -> None:
        self._open: dict[str, Made] = {}
        self._over: deque[Ended] = deque(maxlen=MAX_ENDED_JOBS)

    def note(self, job: str, forecast: Forecast, now: float) -> None:
        """Record a model's forecast, if it is the first one of its job."""
        if job not in self._open and math.isfinite(forecast.high) and forecast.low > now:
            self._open[job] = Made(now, forecast.low, forecast.end, forecast.high)

    def of(self, job: str) -> Made | None:
        """Return the recorded forecast of an unfinished job; None if there is none."""
        return self._open.get(job)

    def forget(self, job: str) -> None:
        """Drop the job's forecast, because its work has changed."""
        self._open.pop(job, None)

    def ended(self, job: str, now: float, *, done: bool) -> None:
        """Record the end of a job; ``done``: whether it completed."""
        first_forecast = self._open.pop(job, None)
        if first_forecast is not None:
            self._over.append(Ended(first_forecast, now, done))

    def restore(self, over: Sequence[Ended], unfinished: dict[str, Made]) -> None:
        """Restore stored forecasts: ``over`` of ended jobs, the oldest first, and ``unfinished`` by
        job.
        """
        self._over.extend(over)
        self._open.update(unfinished)

    def corrected(self, forecast: Forecast, now: float) -> Forecast:
        """Return the forecast, corrected by the errors of past forecasts."""
        if not (math.isfinite(forecast.high) and forecast.low > now):
            return forecast
        bounds = (forecast.low, forecast.end, forecast.high)
        each = [now + f * (at - now) for f, at in zip(self._factors(now), bounds, strict=True)]
        low, end, high = sorted(each)
        return replace(forecast, low=low, end=end, high=high)

    def _factors(self, now: float) -> tuple[float, ...]:
        """Return the factors on the times to the low end of an interval, to the forecast, and to
        the high end.
        """
        observations = [*self._over, *(Ended(made, now, False) for made in self._open.values())]
        ended = sum(each.done for each in observations)
        if not ended:
            return INITIAL_FACTORS
        elapsed_log = np.log([max(1.0, each.at - each.made.at) for each in observations])
        done = np.array([each.done for each in observations])
        trust = ended / (ended + INITIAL_FACTORS_WEIGHT)
        factors = []
        for bound, (part, unseen) in enumerate(
            zip(BOUND_FRACTIONS, INITIAL_FACTORS, strict=True), start=1
        ):
            forecast_s = np.log(
                [max(1.0, each.made[bound] - each.made.at) for each in observations]
            )
            error = reached(elapsed_log - forecast_s, done, part)
            factors.append(math.exp(trust * error + (1.0 - trust) * math.log(unseen)))
        return tuple(factors)


def reached(values: Floats, done: npt.NDArray[np.bool_], part: float) -> float:
    """Return the value at or below which ``part`` of all end (product-limit estimate), at most the
    largest value.

    Args:
        values: value at which each ended, or its last observed value.
        done: whether each of them ended.
        part: fraction from 0 to 1.
    """
    order = np.lexsort((~done, values))
    values, done = values[order], done[order]
    at_risk = len(values) - np.arange(len(values))
    survival = np.cumprod(np.where(done, 1.0 - 1.0 / at_risk, 1.0))
    position = int(np.searchsorted(-survival, part - 1.0 - 1e-12))
    return float(values[min(position, len(values) - 1)])
