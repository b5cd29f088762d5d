"""The remaining length of a gap: the survival function of gap lengths, given the age of the gap.

The lengths of a site's gaps are stored as a histogram over logarithmic bins (about a hundred
numbers for any number of gaps). A prior counts as a few gaps, until there are real ones. The life
table (Kaplan and Meier's product over the bins, with the actuarial half for gaps with an unobserved
end) gives the expected remaining time of a gap of known age, and the rate at which it ends. Uses
the standard library only. It decides nothing about leases.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

FIRST_EDGE_S = 1.0
RATIO = 1.15
BINS = 112
"""Number of bins. Their edges go from 1 s to 1.15^111 s = 63 days. A single length is known to half
a bin, 7 %.
"""
EDGES_S = (0.0, *(FIRST_EDGE_S * RATIO**k for k in range(BINS)))
PRIOR_MEAN_S = 1192.0
PRIOR_SIGMA = 1.36
"""Mean of the gap lengths of Summit in February 2021, seconds, and the standard deviation of their
logarithm.
"""
RATE_WINDOW_S = 120.0
"""Time over which :attr:`GapForecast.end_rate` is the mean, seconds."""
_FORMAT = 1


class GapForecast(NamedTuple):
    """Forecast of one open gap, from its age."""

    cohort: float
    """Its cohort, by the start of the gap. Gaps of one cohort are assumed to end together."""
    horizon_s: float
    """Expected remaining length, seconds."""
    end_rate: float
    """Mean rate at which the gap ends in the next :data:`RATE_WINDOW_S`, 1/s."""


@dataclass(frozen=True)
class _Table:
    """A survival function S at each edge (linear in between), and the integral of S from each edge
    on.
    """

    survival: list[float]
    rest: list[float]

    def at(self, time_s: float) -> float:
        """Return S at ``time_s``. Beyond the last edge, S is constant."""
        if time_s >= EDGES_S[-1]:
            return self.survival[-1]
        k = _bin(time_s)
        a, b = self.survival[k], self.survival[k + 1]
        return a + (b - a) * (time_s - EDGES_S[k]) / (EDGES_S[k + 1] - EDGES_S[k])


class SurvivalEstimator:
    """Estimates the lengths of gaps from the observed ones.

    Args:
        prior_mean_s: expected length of a gap before the first observation, seconds (from the
            site's configuration). Its spread is Summit's.
        prior_weight: weight of the prior, in gaps.
        half_life: number of newer gaps after which the weight of a gap is halved; None: it never
            decays.
    """

    def __init__(
        self,
        *,
        prior_mean_s: float = PRIOR_MEAN_S,
        prior_weight: float = 10.0,
        half_life: float | None = 20_000.0,
    ) -> None:
        for name, value in (
            ("prior_mean_s", prior_mean_s),
            ("prior_weight", prior_weight),
            ("half_life", half_life or 1.0),
        ):
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a positive number; got {value!r}.")
        self.prior_mean_s = prior_mean_s
        self.prior_weight = prior_weight
        self.half_life = half_life
        self.observed = 0
        """Number of gaps observed so far, including those with an unobserved end."""
        self._ended = [0.0] * BINS
        self._unseen = [0.0] * BINS
        self._weight = 1.0
        self._prior = _lognormal_bins(prior_mean_s)
        self._table: _Table | None = None

    def observe(self, length_s: float, *, ended: bool = True) -> None:
        """Add the length of a gap. ``ended`` is False if the gap was still open, so that its length
        is at least ``length_s``.

        Negative and non-finite lengths (after a clock is set back) are ignored.
        """
        if not (length_s >= 0 and math.isfinite(length_s)):
            return
        if self.half_life is not None:
            # Increase the weight of newer gaps instead of decreasing that of older ones: one
            # multiplication instead of one per bin.
            self._weight *= 2.0 ** (1.0 / self.half_life)
            if self._weight > 1e12:
                self._ended = [x / self._weight for x in self._ended]
                self._unseen = [x / self._weight for x in self._unseen]
                self._weight = 1.0
        (self._ended if ended else self._unseen)[_bin(length_s)] += self._weight
        self.observed += 1
        self._table = None

    def survival(self, time_s: float, age_s: float = 0.0) -> float:
        """Return the probability that a gap of this age lasts ``time_s`` seconds more."""
        if not time_s > 0:
            return 1.0
        table, age = self._life_table(), _known_age(age_s)
        return table.at(age + time_s) / table.at(age)

    def expected_remaining(self, age_s: float = 0.0) -> float:
        """Return the expected remaining length of a gap that is ``age_s`` old, seconds: the
        integral of the survival function from there on.
        """
        table, age = self._life_table(), _known_age(age_s)
        k, current = _bin(age), table.at(age)
        return (
            (EDGES_S[k + 1] - age) * (current + table.survival[k + 1]) / 2.0 + table.rest[k + 1]
        ) / current

    def end_rate(self, age_s: float = 0.0) -> float:
        """Return the mean rate at which a gap of this age ends in the next
        :data:`RATE_WINDOW_S`, 1/s: ``-ln(survival) / window``.
        """
        return -math.log(max(1e-9, self.survival(RATE_WINDOW_S, age_s))) / RATE_WINDOW_S

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for storing as JSON."""
        return {
            "format": _FORMAT,
            "prior_mean_s": self.prior_mean_s,
            "prior_weight": self.prior_weight,
            "half_life": self.half_life,
            "observed": self.observed,
            "ended": {str(k): x / self._weight for k, x in enumerate(self._ended) if x},
            "unseen": {str(k): x / self._weight for k, x in enumerate(self._unseen) if x},
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> SurvivalEstimator:
        """Restore the result of :meth:`to_dict`. Raises ValueError if ``value`` is something
        else.
        """
        try:
            if value["format"] != _FORMAT:
                raise ValueError(f"format {value['format']!r}")
            self = cls(
                prior_mean_s=value["prior_mean_s"],
                prior_weight=value["prior_weight"],
                half_life=value["half_life"],
            )
            self.observed = int(value["observed"])
            for name, target in (("ended", self._ended), ("unseen", self._unseen)):
                for k, x in value[name].items():
                    if not (0 <= int(k) < BINS and float(x) >= 0 and math.isfinite(x)):
                        raise ValueError(f"{name}[{k}] = {x!r}")
                    target[int(k)] = float(x)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"The stored gap lengths cannot be used ({error}); delete them to start again."
            ) from None
        return self

    def _life_table(self) -> _Table:
        if self._table is not None:
            return self._table
        prior = [p * self.prior_weight for p in self._prior]
        ended = [x / self._weight + p for x, p in zip(self._ended, prior, strict=True)]
        unseen = [x / self._weight for x in self._unseen]
        # Sum from the far end, so that the few gaps of the tail are not lost in the rounding of the
        # many before.
        later = [0.0] * (BINS + 1)
        for k in reversed(range(BINS)):
            later[k] = later[k + 1] + ended[k] + unseen[k]
        survival = [1.0]
        for k in range(BINS):
            outlived = later[k + 1] + unseen[k] / 2.0
            survival.append(survival[-1] * outlived / (outlived + ended[k]))
        integral = [0.0] * (BINS + 1)
        for k in reversed(range(BINS)):
            integral[k] = (
                integral[k + 1]
                + (EDGES_S[k + 1] - EDGES_S[k]) * (survival[k] + survival[k + 1]) / 2.0
            )
        self._table = _Table(survival, integral)
        return self._table


class GapWatch:
    """Feeds an estimator from polls. A gap that the latest poll no longer shows is taken to have
    ended halfway between the two polls.
    """

    def __init__(self, estimator: SurvivalEstimator) -> None:
        self.estimator = estimator
        self._open: dict[str, float] = {}
        self._seen_at = 0.0

    def update(self, idle_since: Mapping[str, float], now: float) -> None:
        """Note the nodes in a gap at ``now``, including leased ones, with the start of the gap;
        both in epoch seconds.
        """
        for node, since in self._open.items():
            if idle_since.get(node) != since:
                self.estimator.observe(0.5 * (self._seen_at + now) - since)
        self._open = dict(idle_since)
        self._seen_at = now

    def horizon(self, idle_since: float, now: float) -> float:
        """Return the expected remaining seconds of a gap that began at ``idle_since``."""
        return self.estimator.expected_remaining(now - idle_since)

    def forecasts(self, now: float) -> dict[str, GapForecast]:
        """Return the forecast of each gap of the latest :meth:`update`; ``now`` in epoch
        seconds.
        """
        by_start = {
            began: GapForecast(
                began,
                self.estimator.expected_remaining(now - began),
                self.estimator.end_rate(now - began),
            )
            for began in set(self._open.values())
        }
        return {node: by_start[began] for node, began in self._open.items()}


def _bin(length_s: float) -> int:
    return min(max(bisect_right(EDGES_S, length_s) - 1, 0), BINS - 1)


def _known_age(age_s: float) -> float:
    """Limit the age to the last bin, because nothing is known about older gaps."""
    return min(max(age_s, 0.0), EDGES_S[-2])


@lru_cache(maxsize=8)
def _lognormal_bins(mean_s: float) -> tuple[float, ...]:
    mu = math.log(mean_s) - 0.5 * PRIOR_SIGMA**2
    law = NormalDist(mu, PRIOR_SIGMA)
    below = [0.0, *(law.cdf(math.log(edge)) for edge in EDGES_S[1:])]
    return tuple(max(b - a, 1e-12) for a, b in itertools.pairwise(below))
