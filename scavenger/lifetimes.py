"""How long each gap lasts yet: a discrete-time hazard model that learns while the daemon runs.

For a gap that is open now, the time ahead is cut into bins (:data:`EDGES_S`). The probability that
a gap that has outlived the bins before ends in bin *k* is logistic: the log odds that the life
table of all gaps gives for its age (:mod:`scavenger.horizon`), and a sum over what else is known
now (:mod:`scavenger.gap_features`), with weights of its own for each bin. That is landmarking (van
Houwelingen, *Scandinavian Journal of Statistics* 34, 2007) with the discrete-time logistic hazard
(Cox 1972; Tutz and Schmid, *Modeling Discrete Time-to-Event Data*, chapter 3).

Learning is online. Every :data:`EVERY_S` a few open gaps are put aside with their numbers; as soon
as a bin has passed it is known which of them ended in it, and the bin's weights take one Newton
step with a fading memory of the curvature (the extended Kalman filter of logistic regression).
Nothing is known before its time: a forecast made now uses only bins that are over.

The main scheduler's ways change from day to day, and what was true of them may mislead. So each bin
keeps three opinions, the life table's, the model's and the base rate (how many of those that
reached the bin lately ended in it, whatever else is known), and follows each by how well it has
foretold lately (a fixed share of experts: Herbster and Warmuth, *Machine Learning* 32, 1998). While
little was seen all say the same.

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
"""The bins ahead. Beyond the last edge the hazard is taken to stay what it is in the last bin."""
BINS = len(EDGES_S) - 1
EVERY_S = 60.0
"""Time between two moments that are learned from."""
LEARNED_FROM = 64
"""Gaps of one such moment that are learned from at most, drawn at random."""
HALF_LIFE = 4 * 86400.0 / EVERY_S
"""After so many such moments, four days, what was seen counts half."""
RIDGE = 30.0
"""Weight of the belief that the life table says it all, in gaps."""
_CALENDAR_RIDGE = 30.0
"""So many times as much for hour and weekday: a week shows each weekday once."""
_WIDTHS = np.diff(EDGES_S)
_COUNTS = np.minimum(1.0, 2.0 * EVERY_S / _WIDTHS)
"""What one observation of each bin counts: what is seen of a wide bin at one moment is mostly what
was seen of it at the moments before.
"""
OPINIONS = 3
"""Of each bin: the life table's, the model's, the base rate."""
_SHARE = 0.01
"""So much of the trust is shared out anew at each observation: the best opinion may be another one
tomorrow.
"""
_MOST = 8.0
"""Largest log odds that are believed."""
_FORMAT = 2


class SurvivalCurve(NamedTuple):
    """Forecast for gaps that began together."""

    times_s: tuple[float, ...]
    """Seconds from now, the first 0."""
    survival: tuple[float, ...]
    """The probability, over them on average, that one is open still then."""


Foretelling = dict[str, tuple[float, SurvivalCurve]]
"""Node → (expected remaining seconds of its gap, what is foretold of all that began with it)"""


class LifetimeModel:
    """What the features of a gap add to the life table: a row of weights for each bin."""

    def __init__(self) -> None:
        ridge = np.full(len(NAMES), RIDGE)
        ridge[[NAMES.index(name) for name in CALENDAR]] *= _CALENDAR_RIDGE
        self._ridge = np.diag(ridge)
        self.weights = np.zeros((BINS, len(NAMES)))
        self.curvature = np.repeat(self._ridge[None], BINS, axis=0)
        self.seen = np.zeros((BINS, 2))
        """How many gaps ended in each bin of late, and how many reached it."""
        self.trust = np.full((BINS, OPINIONS), 1.0 / OPINIONS)
        """What each opinion counts in each bin."""
        self.steps = 0
        """How often the weights were moved."""

    def survival(self, rows: Floats, table: Floats) -> Floats:
        """The probability that each gap outlives each edge.

        Args:
            rows: features of each gap, shape (gaps, features), see
                :meth:`scavenger.gap_features.GapFeatures.of`.
            table: log odds by the life table, shape (gaps, bins).

        Returns:
            Array of shape (gaps, edges), 1 at the first edge.
        """
        survival = np.ones((len(rows), BINS + 1))
        predictions = self._opinions(slice(None), rows, table)
        hazard = (predictions * self.trust).sum(axis=-1)
        np.cumprod(1.0 - hazard, axis=1, out=survival[:, 1:])
        return survival

    def learn(self, k: int, rows: Floats, table: Floats, ended: Floats, weight: Floats) -> None:
        """Of the gaps that reached bin ``k``, which ended in it (1.0) and which outlived it
        (0.0); ``table``: (gaps,) log odds by the life table when they were put aside.
        """
        weight = weight * _COUNTS[k]
        opinions = self._opinions(k, rows, table)
        p = opinions[:, 1]
        better = np.array(
            [_likelihood(opinions[:, each], ended, weight) for each in range(OPINIONS)]
        )
        trust = self.trust[k] * np.exp(np.maximum(better - better.max(), -_MOST))
        self.trust[k] = (1.0 - _SHARE) * trust / trust.sum() + _SHARE / OPINIONS
        keep = 0.5 ** (1.0 / HALF_LIFE)
        self.seen[k] = keep * self.seen[k] + (weight @ ended, weight.sum())
        self.curvature[k] *= keep
        self.curvature[k] += (1.0 - keep) * self._ridge
        self.curvature[k] += (rows.T * (weight * np.maximum(p * (1.0 - p), 1e-3))) @ rows
        self.weights[k] += np.linalg.solve(self.curvature[k], rows.T @ (weight * (ended - p)))
        self.steps += 1

    def _opinions(self, k: int | slice, rows: Floats, table: Floats) -> Floats:
        """(gaps, [bins,] opinions) That a gap that reaches bin ``k`` ends in it."""
        by_age = _logistic(table)
        model = _logistic(table + rows @ self.weights[k].T)
        ended, reached = self.seen[k].T
        base = (ended + RIDGE * by_age) / (reached + RIDGE)
        return np.stack((by_age, model, base), axis=-1)


def _logistic(odds: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(odds, -_MOST, _MOST))))


def _likelihood(p: Floats, ended: Floats, weight: Floats) -> float:
    return float(weight @ np.log(np.maximum(np.where(ended > 0, p, 1.0 - p), 1e-9)))


@dataclass
class _Landmark:
    """Gaps put aside at one moment."""

    at: float
    nodes: tuple[str, ...]
    rows: Floats
    table: Floats
    weight: Floats
    lasted: Floats
    """How long each lasted from then on; infinite while it is open."""


class Lifetimes:
    """The model, fed by polls, and its forecasts for the gaps of the latest one. ``lengths``: the
    life table, which it feeds as well.
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
        self._put_at = -math.inf
        self._waiting: list[tuple[float, int, int, _Landmark]] = []
        self._number = 0
        self._open: dict[str, list[tuple[_Landmark, int]]] = {}

    def update(
        self, idle_since: Mapping[str, float], now: float, requested: float | None = None
    ) -> None:
        """Note which nodes are in a gap now, and learn from the gaps that have ended.

        Args:
            idle_since: node (a leased one as well) → beginning of its gap, epoch seconds.
            now: epoch seconds.
            requested: nodes that the waiting jobs of the main scheduler request; None if the
                scheduler does not show them.
        """
        if now < self.features.now:  # the clock was set back
            self._forget()
        end = 0.5 * (self.features.now + now)
        for node, length in self.features.update(idle_since, now, requested).items():
            self.lengths.observe(length)
            for landmark, row in self._open.pop(node, ()):
                landmark.lasted[row] = end - landmark.at
        while self._waiting and self._waiting[0][0] <= now:
            _, _, k, landmark = heapq.heappop(self._waiting)
            self._learn(k, landmark)
        if now - self._put_at >= EVERY_S and idle_since:
            self._put_aside(now)

    def survival(self, nodes: Sequence[str], now: float) -> Floats:
        """(nodes, edges) For each of these nodes, in a gap at the latest update, the probability
        that it is idle still after each of :data:`EDGES_S`.
        """
        if not len(nodes):
            return np.ones((0, BINS + 1))
        return self.model.survival(self.features.of(nodes, now), self.table(nodes, now))

    def foretell(self, now: float) -> Foretelling:
        """How long every gap of the latest update lasts yet."""
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
        """(nodes, bins) Log odds that a gap of its age that reaches a bin ends in it."""
        since = np.array([self.features.idle_since[node] for node in nodes])
        ages = np.clip(now - since, 0.0, AGES_S[-2])
        ahead = ages[:, None] + np.array(EDGES_S)
        survival = np.maximum(np.interp(ahead, AGES_S, self.lengths.curve()), 1e-12)
        hazard = np.clip(1.0 - survival[:, 1:] / survival[:, :-1], 1e-4, 1.0 - 1e-4)
        return np.asarray(np.log(hazard / (1.0 - hazard)))

    def _put_aside(self, now: float) -> None:
        self._put_at = now
        names = sorted(self.features.idle_since)
        if len(names) > LEARNED_FROM:
            drawn = self._random.choice(len(names), LEARNED_FROM, replace=False)
            names = [names[i] for i in sorted(drawn.tolist())]
        since = [self.features.idle_since[n] for n in names]
        # Gaps that began together mostly end together: many of them tell no more than one.
        _, which, together = np.unique(since, return_inverse=True, return_counts=True)
        rows, table = self.features.of(names, now), self.table(names, now)
        lasted = np.full(len(names), np.inf)
        landmark = _Landmark(now, tuple(names), rows, table, 1.0 / together[which], lasted)
        for row, node in enumerate(names):
            self._open.setdefault(node, []).append((landmark, row))
        self._wait(landmark, 0)

    def _wait(self, landmark: _Landmark, k: int) -> None:
        self._number += 1
        heapq.heappush(self._waiting, (landmark.at + EDGES_S[k + 1], self._number, k, landmark))

    def _learn(self, k: int, landmark: _Landmark) -> None:
        reached = landmark.lasted > EDGES_S[k]
        if reached.any():
            ended = (landmark.lasted[reached] <= EDGES_S[k + 1]).astype(np.float64)
            table, weight = landmark.table[reached, k], landmark.weight[reached]
            self.model.learn(k, landmark.rows[reached], table, ended, weight)
        if k + 1 < BINS and reached.any():
            self._wait(landmark, k + 1)
            return
        for row, node in enumerate(landmark.nodes):
            if landmark.lasted[row] == np.inf and node in self._open:
                remaining = [entry for entry in self._open[node] if entry[0] is not landmark]
                if remaining:
                    self._open[node] = remaining
                else:
                    del self._open[node]

    def _forget(self) -> None:
        self._waiting.clear()
        self._open.clear()
        self._put_at = -math.inf

    def to_dict(self) -> dict[str, Any]:
        """Plain values for storing as JSON: what was learned. What is put aside is not kept, and
        the life table is its own.
        """
        return {
            "format": _FORMAT,
            "names": list(NAMES),
            "edges_s": list(EDGES_S),
            "weights": _short(self.model.weights),
            "curvature": _short(self.model.curvature),
            "seen": self.model.seen.tolist(),
            "trust": self.model.trust.tolist(),
            "steps": self.model.steps,
            "moment": self.features.to_dict(),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], lengths: SurvivalEstimator) -> Lifetimes:
        """What :meth:`to_dict` gave, with the life table. Raises ValueError when it is something
        else, or of another version.
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
                f"The stored lifetimes of gaps cannot be used ({error}); delete them to begin anew."
            ) from None


def _short(values: Floats) -> Any:
    """With seven digits, which is all that they are worth, to spare the file."""
    return np.vectorize(lambda x: float(f"{x:.7g}"), otypes=[float])(values).tolist()


def _shaped(values: Any, shape: tuple[int, ...]) -> Floats:
    array = np.array(values, dtype=np.float64)
    if array.shape != shape or not np.isfinite(array).all():
        raise ValueError(f"numbers of shape {array.shape} where {shape} was expected")
    return array


def expected(survival: Floats) -> Floats:
    """(gaps,) Expected remaining seconds: the integral of the survival (gaps, edges), with a
    constant hazard beyond the last edge.
    """
    within = 0.5 * (survival[:, :-1] + survival[:, 1:]) @ _WIDTHS
    last = np.clip(survival[:, -1] / np.maximum(survival[:, -2], 1e-12), 1e-9, 1.0 - 1e-3)
    return np.asarray(within + survival[:, -1] * _WIDTHS[-1] / -np.log(last))
