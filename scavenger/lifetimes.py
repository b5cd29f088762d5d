"""Forecasts of the remaining length of each gap: a discrete-time hazard model that learns while the
daemon runs.

For a gap that is open now, the time ahead is divided into bins (:data:`EDGES_S`). The probability
that a gap that reaches bin *k* ends in it is logistic. Its log odds are those of the life table of
all gaps at this age (:mod:`scavenger.horizon`), plus a weighted sum of the features that are known
now (:mod:`scavenger.gap_features`), with separate weights for each bin. This is landmarking (van
Houwelingen, *Scandinavian Journal of Statistics* 34, 2007) with the discrete-time logistic hazard
(Cox 1972; Tutz and Schmid, *Modeling Discrete Time-to-Event Data*, chapter 3).

Learning is online. Every :data:`LANDMARK_INTERVAL_S` the model stores a sample of open gaps with
their features (a landmark). When a bin of the landmark has passed, it is known which of these gaps
ended in it. The weights of the bin then take one Newton step with a fading memory of the curvature
(the extended Kalman filter of logistic regression). So a forecast uses only bins that have passed.

The behaviour of the main scheduler changes from day to day, so the model can be wrong. Therefore
each bin mixes three estimates: the life table's, the model's and the base rate (the fraction of
gaps that ended in the bin among those that reached it recently). Their weights follow their recent
accuracy (fixed share of experts: Herbster and Warmuth, *Machine Learning* 32, 1998). After few
observations all three agree.

It decides nothing about leases or jobs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from scavenger.gap_features import CALENDAR, NAMES, Floats, GapFeatures
from scavenger.horizon import EDGES_S as AGES_S
from scavenger.horizon import PRIOR_MEAN_S, SurvivalEstimator

EDGES_S = (0.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 14400.0)
"""Edges of the bins ahead, seconds. Beyond the last edge the hazard is that of the last bin."""
BINS = len(EDGES_S) - 1
LANDMARK_INTERVAL_S = 60.0
"""Time between two landmarks, seconds."""
MAX_LANDMARK_GAPS = 64
"""Maximum number of gaps in a landmark, drawn at random."""
HALF_LIFE = 4 * 86400.0 / LANDMARK_INTERVAL_S
"""Number of landmarks (four days) after which the weight of an observation is halved."""
RIDGE = 30.0
"""Weight of the prior that all feature weights are 0 (the life table alone is right), in gaps."""
_CALENDAR_RIDGE = 30.0
"""Factor on RIDGE for hour and weekday, because a week contains each weekday only once."""
_WIDTHS = np.diff(EDGES_S)
_OBSERVATION_WEIGHTS = np.minimum(1.0, 2.0 * LANDMARK_INTERVAL_S / _WIDTHS)
"""Weight of one observation in each bin. Successive landmarks observe mostly the same events in a
wide bin.
"""
ESTIMATES = 3
"""Number of estimates in each bin: the life table's, the model's, the base rate."""
_REDISTRIBUTED_FRACTION = 0.01
"""Fraction of the trust that is redistributed at each observation, because the best estimate can
change.
"""
_MAX_LOG_ODDS = 8.0
"""Maximum absolute log odds."""
_FORMAT = 2


class SurvivalCurve(NamedTuple):
    """Forecast for gaps that began together."""

    times_s: tuple[float, ...]
    """Seconds from now, the first 0."""
    survival: tuple[float, ...]
    """Mean probability that one of these gaps is still open at each of ``times_s``."""


Forecasts = dict[str, tuple[float, SurvivalCurve]]
"""Node → (expected remaining seconds of its gap, forecast for all gaps that began with it)"""


class LifetimeModel:
    """The contribution of a gap's features to the life table: a row of weights for each bin."""

    def __init__(self) -> None:
        ridge = np.full(len(NAMES), RIDGE)
        ridge[[NAMES.index(name) for name in CALENDAR]] *= _CALENDAR_RIDGE
        self._ridge = np.diag(ridge)
        self.weights = np.zeros((BINS, len(NAMES)))
        self.curvature = np.repeat(self._ridge[None], BINS, axis=0)
        self.seen = np.zeros((BINS, 2))
        """Recent number of gaps that ended in each bin, and of those that reached it; both decay.
        Shape (bins, 2).
        """
        self.trust = np.full((BINS, ESTIMATES), 1.0 / ESTIMATES)
        """Weight of each estimate in each bin, shape (bins, estimates)."""
        self.steps = 0
        """Number of updates of the weights."""

    def survival(self, rows: Floats, table: Floats) -> Floats:
        """Return the probability that each gap outlives each edge.

        Args:
            rows: features of each gap, shape (gaps, features), see
                :meth:`scavenger.gap_features.GapFeatures.of`.
            table: log odds by the life table, shape (gaps, bins).

        Returns:
            Array of shape (gaps, edges), 1 at the first edge.
        """
        survival = np.ones((len(rows), BINS + 1))
        predictions = self._estimates(slice(None), rows, table)
        hazard = (predictions * self.trust).sum(axis=-1)
        np.cumprod(1.0 - hazard, axis=1, out=survival[:, 1:])
        return survival

    def learn(self, k: int, rows: Floats, table: Floats, ended: Floats, weight: Floats) -> None:
        """Update the weights of bin ``k`` with the gaps that reached it.

        Args:
            k: number of the bin.
            rows: features of the gaps, shape (gaps, features).
            table: log odds by the life table at the landmark, shape (gaps,).
            ended: 1.0 if the gap ended in the bin, 0.0 if it outlived it, shape (gaps,).
            weight: weight of each gap, shape (gaps,).
        """
        weight = weight * _OBSERVATION_WEIGHTS[k]
        opinions = self._estimates(k, rows, table)
        p = opinions[:, 1]
        better = np.array(
            [_likelihood(opinions[:, each], ended, weight) for each in range(ESTIMATES)]
        )
        trust = self.trust[k] * np.exp(np.maximum(better - better.max(), -_MAX_LOG_ODDS))
        self.trust[k] = (
            1.0 - _REDISTRIBUTED_FRACTION
        ) * trust / trust.sum() + _REDISTRIBUTED_FRACTION / ESTIMATES
        keep = 0.5 ** (1.0 / HALF_LIFE)
        self.seen[k] = keep * self.seen[k] + (weight @ ended, weight.sum())
        self.curvature[k] *= keep
        self.curvature[k] += (1.0 - keep) * self._ridge
        self.curvature[k] += (rows.T * (weight * np.maximum(p * (1.0 - p), 1e-3))) @ rows
        self.weights[k] += np.linalg.solve(self.curvature[k], rows.T @ (weight * (ended - p)))
        self.steps += 1

    def _estimates(self, k: int | slice, rows: Floats, table: Floats) -> Floats:
        """Return each estimate of the probability that a gap that reaches bin ``k`` ends in it,
        shape (gaps, [bins,] estimates).
        """
        by_age = _logistic(table)
        model = _logistic(table + rows @ self.weights[k].T)
        ended, reached = self.seen[k].T
        base = (ended + RIDGE * by_age) / (reached + RIDGE)
        return np.stack((by_age, model, base), axis=-1)


def _logistic(odds: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(odds, -_MAX_LOG_ODDS, _MAX_LOG_ODDS))))


def _likelihood(p: Floats, ended: Floats, weight: Floats) -> float:
    return float(weight @ np.log(np.maximum(np.where(ended > 0, p, 1.0 - p), 1e-9)))


@dataclass
class _Landmark:
    """A sample of the gaps that were open at one time."""

    at: float
    nodes: tuple[str, ...]
    rows: Floats
    table: Floats
    weight: Floats
    lasted: Floats
    """Seconds for which each gap lasted after the landmark; infinite while it is open."""


class Lifetimes:
    """The model, fed by polls, and its forecasts for the gaps of the latest poll. It also feeds
    ``lengths``, the life table.
    """

    def __init__(
        self,
        lengths: SurvivalEstimator | None = None,
        model: LifetimeModel | None = None,
        features: GapFeatures | None = None,
    ) -> None:
        self.lengths = lengths or SurvivalEstimator(prior_mean_s=PRIOR_MEAN_S)
        self.model = model or LifetimeModel()
        self.features = features or GapFeatures()
        self._random = np.random.default_rng(0)
        self._landmark_at = -math.inf
        self._waiting: list[tuple[float, int, int, _Landmark]] = []
        self._number = 0
        self._open: dict[str, list[tuple[_Landmark, int]]] = {}

    def update(
        self, idle_since: Mapping[str, float], now: float, requested: float | None = None
    ) -> None:
        """Note which nodes are in a gap now, and learn from the gaps that have ended.

        Args:
            idle_since: node in a gap, or leased → start of its gap, epoch seconds.
            now: epoch seconds.
            requested: nodes that the waiting jobs of the main scheduler request; None if the
                scheduler does not show them.
        """
        if now < self.features.now:  # the clock was set back
            self._clear()
        end = 0.5 * (self.features.now + now)
        for node, length in self.features.update(idle_since, now, requested).items():
            self.lengths.observe(length)
            for landmark, row in self._open.pop(node, ()):
                landmark.lasted[row] = end - landmark.at
        while self._waiting and self._waiting[0][0] <= now:
            _, _, k, landmark = heapq.heappop(self._waiting)
            self._learn(k, landmark)
        if now - self._landmark_at >= LANDMARK_INTERVAL_S and idle_since:
            self._store_landmark(now)

    def survival(self, nodes: Sequence[str], now: float) -> Floats:
        """Return the probability that each node is still in its gap after each of :data:`EDGES_S`,
        shape (nodes, edges). The nodes must be in a gap at the latest update.
        """
        if not len(nodes):
            return np.ones((0, BINS + 1))
        return self.model.survival(self.features.of(nodes, now), self.table(nodes, now))

    def forecast(self, now: float) -> Forecasts:
        """Return the forecasts for all gaps of the latest update."""
        since = self.features.idle_since
        nodes = list(since)
        if not nodes:
            return {}
        survival = self.survival(nodes, now)
        lasts = expected(survival).tolist()
        begins, which = np.unique([since[node] for node in nodes], return_inverse=True)
        mean = np.zeros((len(begins), BINS + 1))
        np.add.at(mean, which, survival)
        mean /= np.bincount(which)[:, None]
        cohorts = [SurvivalCurve(EDGES_S, tuple(row)) for row in mean.tolist()]
        each = zip(nodes, lasts, which.tolist(), strict=True)
        return {node: (remaining_s, cohorts[k]) for node, remaining_s, k in each}

    def table(self, nodes: Sequence[str], now: float) -> Floats:
        """Return the log odds by the life table, at the age of each node's gap, that a gap that
        reaches a bin ends in it. Shape (nodes, bins).
        """
        since = np.array([self.features.idle_since[node] for node in nodes])
        ages = np.clip(now - since, 0.0, AGES_S[-2])
        ahead = ages[:, None] + np.array(EDGES_S)
        survival = np.maximum(np.interp(ahead, AGES_S, self.lengths.curve()), 1e-12)
        hazard = np.clip(1.0 - survival[:, 1:] / survival[:, :-1], 1e-4, 1.0 - 1e-4)
        return np.asarray(np.log(hazard / (1.0 - hazard)))

    def _store_landmark(self, now: float) -> None:
        self._landmark_at = now
        names = sorted(self.features.idle_since)
        if len(names) > MAX_LANDMARK_GAPS:
            drawn = self._random.choice(len(names), MAX_LANDMARK_GAPS, replace=False)
            names = [names[i] for i in sorted(drawn.tolist())]
        since = [self.features.idle_since[n] for n in names]
        # Gaps that began together mostly end together, so many of them carry as much information as
        # one.
        _, cohort_index, cohort_sizes = np.unique(since, return_inverse=True, return_counts=True)
        rows, table = self.features.of(names, now), self.table(names, now)
        durations = np.full(len(names), np.inf)
        landmark = _Landmark(
            now, tuple(names), rows, table, 1.0 / cohort_sizes[cohort_index], durations
        )
        for row, node in enumerate(names):
            self._open.setdefault(node, []).append((landmark, row))
        self._queue(landmark, 0)

    def _queue(self, landmark: _Landmark, k: int) -> None:
        self._number += 1
        heapq.heappush(self._waiting, (landmark.at + EDGES_S[k + 1], self._number, k, landmark))

    def _learn(self, k: int, landmark: _Landmark) -> None:
        reached = landmark.lasted > EDGES_S[k]
        if reached.any():
            ended = (landmark.lasted[reached] <= EDGES_S[k + 1]).astype(np.float64)
            table, weight = landmark.table[reached, k], landmark.weight[reached]
            self.model.learn(k, landmark.rows[reached], table, ended, weight)
        if k + 1 < BINS and reached.any():
            self._queue(landmark, k + 1)
            return
        for row, node in enumerate(landmark.nodes):
            if landmark.lasted[row] == np.inf and node in self._open:
                remaining = [entry for entry in self._open[node] if entry[0] is not landmark]
                if remaining:
                    self._open[node] = remaining
                else:
                    del self._open[node]

    def _clear(self) -> None:
        self._waiting.clear()
        self._open.clear()
        self._landmark_at = -math.inf

    def to_dict(self) -> dict[str, Any]:
        """Return the learned values as plain values for storing as JSON. Excludes the open
        landmarks, and the life table, which is stored separately.
        """
        return {
            "format": _FORMAT,
            "names": list(NAMES),
            "edges_s": list(EDGES_S),
            "weights": _rounded(self.model.weights),
            "curvature": _rounded(self.model.curvature),
            "seen": self.model.seen.tolist(),
            "trust": self.model.trust.tolist(),
            "steps": self.model.steps,
            "moment": self.features.to_dict(),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], lengths: SurvivalEstimator) -> Lifetimes:
        """Restore the result of :meth:`to_dict`, with the life table. Raises ValueError if
        ``value`` is something else or of another version.
        """
        try:
            if (value["format"], tuple(value["names"]), tuple(value["edges_s"])) != (
                _FORMAT,
                NAMES,
                EDGES_S,
            ):
                raise ValueError("it is of another version")
            model = LifetimeModel()
            model.weights = _shaped(value["weights"], model.weights.shape)
            model.curvature = _shaped(value["curvature"], model.curvature.shape)
            model.seen = np.maximum(_shaped(value["seen"], model.seen.shape), 0.0)
            trust = np.clip(_shaped(value["trust"], model.trust.shape), 1e-3, 1.0)
            model.trust = trust / trust.sum(axis=1, keepdims=True)
            model.steps = int(value["steps"])
            return cls(lengths, model, GapFeatures.from_dict(value["moment"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"The stored lifetimes of gaps cannot be used ({error}); delete them to start "
                "again."
            ) from None


def _rounded(values: Floats) -> Any:
    """Return the values with seven digits, which exceeds their accuracy, to keep the file small."""
    return np.vectorize(lambda x: float(f"{x:.7g}"), otypes=[float])(values).tolist()


def _shaped(values: Any, shape: tuple[int, ...]) -> Floats:
    array = np.array(values, dtype=np.float64)
    if array.shape != shape or not np.isfinite(array).all():
        raise ValueError(f"numbers of shape {array.shape} where {shape} was expected")
    return array


def expected(survival: Floats) -> Floats:
    """Return the expected remaining seconds of each gap, shape (gaps,): the integral of
    ``survival``, shape (gaps, edges), with a constant hazard beyond the last edge.
    """
    within = 0.5 * (survival[:, :-1] + survival[:, 1:]) @ _WIDTHS
    last = np.clip(survival[:, -1] / np.maximum(survival[:, -2], 1e-12), 1e-9, 1.0 - 1e-3)
    return np.asarray(within + survival[:, -1] * _WIDTHS[-1] / -np.log(last))
