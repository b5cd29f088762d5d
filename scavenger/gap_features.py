"""The features of the present gaps, for the model that predicts how long they will last.

Keeps the history that the features need: the number of idle nodes over the last hour, how many
gaps ended, how long the gaps of each node and group were. Features use the past only.
:mod:`scavenger.lifetimes` learns from them.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

NAMES = (
    "constant",
    "age",
    "age beyond 3 min",
    "age beyond 15 min",
    "age beyond 1 h",
    "age beyond 4 h",
    "idle nodes",
    "idle nodes beyond 1 %",
    "idle nodes beyond 5 %",
    "idle nodes beyond 25 %",
    "change over 10 min",
    "change over 1 h",
    "fall over 10 min",
    "ends in 10 min",
    "ends in 1 h",
    "since the last end",
    "began together",
    "share that began together",
    "age of the youngest",
    "gaps of the node",
    "gaps of the group",
    "idle in the group",
    "sine of the hour",
    "cosine of the hour",
    "weekend",
    "nodes wanted",
    "queue shown",
    "age × idle nodes",
    "began together × age",
)
"""Names of the features, in the column order of :meth:`GapFeatures.of`."""
CALENDAR = ("sine of the hour", "cosine of the hour", "weekend", "nodes wanted", "queue shown")
"""Features with few independent values in a week."""
_AGE_KNOTS = (180.0, 900.0, 3600.0, 14400.0)
_IDLE_KNOTS = (0.01, 0.05, 0.25)
_PRIOR_GAPS = 3.0
"""Weight of the prior mean, in gaps. The mean length of a node's or group's gaps is shrunk towards
the machine's mean, as if it had this number of average gaps.
"""
_HISTORY_S = 3700.0
_DECAY = 0.8
"""Factor on the weight of a node's earlier gaps at each new gap."""


class GapFeatures:
    """The present gaps, and the history that their features need."""

    def __init__(self) -> None:
        self._since: Mapping[str, float] = {}
        self._now = 0.0
        self._requested: float | None = None
        self._counts: deque[tuple[float, int]] = deque()
        self._ends: deque[tuple[float, int]] = deque()
        self._last_end: float | None = None
        self._usual = [math.log(600.0), 0.0]
        self._nodes: dict[str, list[float]] = {}
        self._groups: dict[str, list[float]] = {}
        self._group_size: Counter[str] = Counter()
        self._cohorts: Counter[float] = Counter()
        self._idle_in: Counter[str] = Counter()

    def update(
        self, idle_since: Mapping[str, float], now: float, requested: float | None = None
    ) -> dict[str, float]:
        """Note which nodes are in a gap now.

        Args:
            idle_since: node → beginning of its gap, epoch seconds.
            now: epoch seconds.
            requested: nodes that the waiting jobs of the main scheduler request; None if the
                scheduler does not show them.

        Returns:
            The gaps that ended since the last call, node → length in seconds. They are taken to
            end halfway between the two calls.
        """
        midpoint, previous = 0.5 * (self._now + now), self._since
        ended: dict[str, float] = {}
        for node, since in previous.items():
            if idle_since.get(node) != since:
                ended[node] = max(0.0, midpoint - since)
                self._close(node, since)
                self._add_length(node, math.log(max(ended[node], 1.0)))
        for node, since in idle_since.items():
            if previous.get(node) != since:
                self._open(node, since)
        if ended:
            self._ends.append((now, len(ended)))
            self._last_end = now
        self._counts.append((now, len(idle_since)))
        for history in (self._counts, self._ends):
            while history and history[0][0] < now - _HISTORY_S:
                history.popleft()
        self._since, self._now, self._requested = dict(idle_since), now, requested
        return ended

    def _open(self, node: str, since: float) -> None:
        group = group_of(node)
        if node not in self._nodes:
            self._nodes[node] = [0.0, 0.0]
            self._group_size[group] += 1
        self._cohorts[since] += 1
        self._idle_in[group] += 1

    def _close(self, node: str, since: float) -> None:
        self._idle_in[group_of(node)] -= 1
        self._cohorts[since] -= 1
        if not self._cohorts[since]:
            del self._cohorts[since]

    @property
    def now(self) -> float:
        """Time of the last :meth:`update`, epoch seconds."""
        return self._now

    @property
    def idle_since(self) -> Mapping[str, float]:
        """Node in a gap → start of the gap, epoch seconds."""
        return self._since

    def of(self, nodes: Sequence[str], now: float) -> Floats:
        """Return the features of these gaps.

        Args:
            nodes: nodes that are in a gap.
            now: epoch seconds.

        Returns:
            Array of shape (nodes, features), columns in the order of :data:`NAMES`.
        """
        count = len(self._since)
        machine = max(1, len(self._nodes))
        share = math.log((count + 1) / (machine + 1))
        log_ratios = [math.log((self._ago(now, s) + 1) / (count + 1)) for s in (600.0, 3600.0)]
        end_counts = [
            math.log1p(sum(n for at, n in self._ends if at > now - s) / (count + 1))
            for s in (600.0, 3600.0)
        ]
        quiet = 3600.0 if self._last_end is None else max(0.0, now - self._last_end)
        youngest = now - max(self._since.values(), default=now)
        hour = datetime.fromtimestamp(now, timezone.utc)
        hour_angle = 2 * math.pi * (hour.hour + hour.minute / 60) / 24
        requested = self._requested
        same = [
            share,
            *(max(0.0, share - math.log(knot)) for knot in _IDLE_KNOTS),
            _clip(-log_ratios[0]),
            _clip(-log_ratios[1]),
            _clip(max(0.0, log_ratios[0])),
            *end_counts,
            math.log1p(min(quiet, 3600.0) / 60.0),
        ]
        calendar = [
            math.log1p(youngest / 60.0),
            math.sin(hour_angle),
            math.cos(hour_angle),
            float(hour.weekday() >= 5),
            0.0 if requested is None else math.log((requested + 1) / (count + 1)),
            float(requested is not None),
        ]
        rows = np.empty((len(nodes), len(NAMES)))
        since = np.array([self._since[node] for node in nodes])
        age = np.log1p(np.maximum(now - since, 0.0) / 60.0)
        rows[:, 0] = 1.0
        rows[:, 1] = age
        for k, knot in enumerate(_AGE_KNOTS):
            rows[:, 2 + k] = np.maximum(0.0, age - math.log1p(knot / 60.0))
        rows[:, 6:16] = same
        log_cohort_size = (
            np.log([self._cohorts[s] for s in since.tolist()]) if len(nodes) else since
        )
        rows[:, 16] = log_cohort_size
        rows[:, 17] = log_cohort_size - math.log(count + 1)
        rows[:, 18] = calendar[0]
        groups = [group_of(node) for node in nodes]
        rows[:, 19] = [self._relative_length(self._nodes[node]) for node in nodes]
        rows[:, 20] = [self._relative_length(self._groups.get(group)) for group in groups]
        rows[:, 21] = [
            math.log((self._idle_in[g] + 0.5) / (self._group_size[g] + 1)) - share for g in groups
        ]
        rows[:, 22:27] = calendar[1:]
        rows[:, 27] = age * share
        rows[:, 28] = log_cohort_size * age
        return rows

    def _ago(self, now: float, seconds: float) -> int:
        """Return the number of idle nodes ``seconds`` before ``now``, or the oldest known number if
        the history is shorter.
        """
        idle = self._counts[0][1] if self._counts else 0
        for at, count in self._counts:
            if at > now - seconds:
                break
            idle = count
        return idle

    def _add_length(self, node: str, length: float) -> None:
        group = self._groups.setdefault(group_of(node), [0.0, 0.0])
        for mean, decay in ((self._nodes[node], _DECAY), (group, 0.98), (self._usual, 0.9995)):
            weight = min(mean[1] + 1.0, 1.0 / (1.0 - decay))
            mean[0] += (length - mean[0]) / weight
            mean[1] = weight

    def _relative_length(self, mean: Sequence[float] | None) -> float:
        """Return the log ratio of the mean length of these gaps to the machine's, shrunk towards 0
        if they are few. ``mean``: (mean log length, weight).
        """
        if mean is None or not mean[1]:
            return 0.0
        return _clip(mean[1] / (mean[1] + _PRIOR_GAPS) * (mean[0] - self._usual[0]))

    def to_dict(self) -> dict[str, Any]:
        """Return the mean lengths of gaps as plain values, to survive a restart."""
        nodes = {n: [round(x, 4) for x in mean] for n, mean in self._nodes.items()}
        groups = {n: [round(x, 4) for x in mean] for n, mean in self._groups.items()}
        return {"usual": self._usual, "nodes": nodes, "groups": groups}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> GapFeatures:
        """Restore the result of :meth:`to_dict`. Raises ValueError, KeyError or TypeError if
        ``value`` is something else.
        """
        self = cls()
        self._usual = _pair(value["usual"])
        self._nodes = {str(n): _pair(mean) for n, mean in value["nodes"].items()}
        self._groups = {str(n): _pair(mean) for n, mean in value["groups"].items()}
        self._group_size = Counter(map(group_of, self._nodes))
        return self


def group_of(node: str) -> str:
    """Return the rack, cabinet or blade of a node: its name without the last number."""
    return node.rstrip("0123456789")


def _clip(x: float, limit: float = 3.0) -> float:
    return max(-limit, min(limit, x))


def _pair(values: Collection[Any]) -> list[float]:
    mean, weight = (float(x) for x in values)
    if not (math.isfinite(mean) and math.isfinite(weight) and weight >= 0):
        raise ValueError(f"[{mean}, {weight}] is not a mean and its weight")
    return [mean, weight]
