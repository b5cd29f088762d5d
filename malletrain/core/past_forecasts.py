"""Corrects forecasts by the errors of past ones. Pure.

Decides by how much an interval is moved and widened so that it contains the end as often as it
claims. What a model leaves out (how a queue moves, what other jobs will take) shows in the errors
of its forecasts. Conformalised quantile regression (Romano et al., NeurIPS 2019), separately for
the median and for each end of the interval, on the logarithm of the time to the end.

The first forecast of each job counts. A job that has not ended shows only a lower bound of its
time; without it the shortest jobs would dominate. It enters as a censored observation (Kaplan and
Meier, 1958).
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

LATEST = 200
"""So many jobs that are over are remembered."""
PARTS = (0.1, 0.5, 0.9)
"""The part of all ends that is to lie below the low end of an interval, the forecast itself, and
the high end."""
UNSEEN = (0.8, 1.0, 2.0)
"""Until ends were seen: such parts of them come within so many times the time that a model says."""
TRUSTED = 10
"""So many jobs that were seen to end count as much as that."""


class Made(NamedTuple):
    """The first forecast of a job, as its model made it: times on the shell's clock."""

    at: float
    low: float
    end: float
    high: float


class Ended(NamedTuple):
    """What came of one."""

    made: Made
    at: float
    done: bool
    """The job was done then; else it was cancelled, say, and would have gone on."""


class PastForecasts:
    """The first forecasts of one controller's jobs, and what came of them."""

    def __init__(self) -> None:
        self._open: dict[str, Made] = {}
        self._over: deque[Ended] = deque(maxlen=LATEST)

    def note(self, job: str, forecast: Forecast, now: float) -> None:
        """A model has made this forecast; the first of each job is kept."""
        if job not in self._open and math.isfinite(forecast.high) and forecast.low > now:
            self._open[job] = Made(now, forecast.low, forecast.end, forecast.high)

    def of(self, job: str) -> Made | None:
        """The one that is kept of an unfinished job."""
        return self._open.get(job)

    def forget(self, job: str) -> None:
        """The job's forecast was one of something else: its work is another now."""
        self._open.pop(job, None)

    def ended(self, job: str, now: float, *, done: bool) -> None:
        """The job is over."""
        made = self._open.pop(job, None)
        if made is not None:
            self._over.append(Ended(made, now, done))

    def restore(self, over: Sequence[Ended], unfinished: dict[str, Made]) -> None:
        """Go on from what was known before; the oldest first."""
        self._over.extend(over)
        self._open.update(unfinished)

    def corrected(self, forecast: Forecast, now: float) -> Forecast:
        """The forecast as it would have had to be to come out right so far."""
        if not (math.isfinite(forecast.high) and forecast.low > now):
            return forecast
        bounds = (forecast.low, forecast.end, forecast.high)
        each = [now + f * (at - now) for f, at in zip(self._factors(now), bounds, strict=True)]
        low, end, high = sorted(each)
        return replace(forecast, low=low, end=end, high=high)

    def _factors(self, now: float) -> tuple[float, ...]:
        """Of the time to the low end of an interval, to the forecast, and to the high end."""
        seen = [*self._over, *(Ended(made, now, False) for made in self._open.values())]
        ended = sum(each.done for each in seen)
        if not ended:
            return UNSEEN
        took = np.log([max(1.0, each.at - each.made.at) for each in seen])
        done = np.array([each.done for each in seen])
        trust = ended / (ended + TRUSTED)
        factors = []
        for bound, (part, unseen) in enumerate(zip(PARTS, UNSEEN, strict=True), start=1):
            forecast_s = np.log([max(1.0, each.made[bound] - each.made.at) for each in seen])
            off = reached(took - forecast_s, done, part)
            factors.append(math.exp(trust * off + (1.0 - trust) * math.log(unseen)))
        return tuple(factors)


def reached(values: Floats, done: npt.NDArray[np.bool_], part: float) -> float:
    """What ``part`` of all end at or below (product-limit estimate), at most the largest value.

    Args:
        values: where each ended, or where it was when it was seen last.
        done: which of them ended.
        part: 0 to 1.
    """
    order = np.lexsort((~done, values))
    values, done = values[order], done[order]
    there = len(values) - np.arange(len(values))
    survival = np.cumprod(np.where(done, 1.0 - 1.0 / there, 1.0))
    at = int(np.searchsorted(-survival, part - 1.0 - 1e-12))
    return float(values[min(at, len(values) - 1)])
