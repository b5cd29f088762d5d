"""What is known of the gaps at one moment, as numbers for a model of how long they last yet.

Keeps the little history that the numbers need: how many nodes were idle over the last hour, how
many gaps ended, how long the gaps of each node and group were. Nothing of what comes later enters.
It learns nothing and decides nothing (:mod:`scavenger.lifetimes`).
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
"""One name a number; :meth:`GapMoment.numbers` gives them in this order."""
CALENDAR = ("sine of the hour", "cosine of the hour", "weekend", "nodes wanted", "queue shown")
"""Those of which a week shows little."""
_AGE_KNOTS = (180.0, 900.0, 3600.0, 14400.0)
_IDLE_KNOTS = (0.01, 0.05, 0.25)
_SHRINK = 3.0
"""The gaps of one node or group count as if this many average ones were among them."""
_REMEMBERED_S = 3700.0
_FADE = 0.8
"""What the mean of a node's gaps keeps at each further one."""


class GapMoment:
    """The gaps as they are now, and the little that is remembered of before."""

    def __init__(self) -> None:
        self._since: Mapping[str, float] = {}
        self._now = 0.0
        self._wanted: float | None = None
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
        self, idle_since: Mapping[str, float], now: float, wanted: float | None = None
    ) -> dict[str, float]:
        """The nodes in a gap at ``now`` with the begin of the gap, both in epoch seconds.

        ``wanted``: nodes that the waiting jobs of the main scheduler ask for; None: not shown.

        Returns the gaps that ended since the last call: node → length in seconds, the end taken
        halfway between the two calls.
        """
        middle, old = 0.5 * (self._now + now), self._since
        ended: dict[str, float] = {}
        for node, since in old.items():
            if idle_since.get(node) != since:
                ended[node] = max(0.0, middle - since)
                self._close(node, since)
                self._remember(node, math.log(max(ended[node], 1.0)))
        for node, since in idle_since.items():
            if old.get(node) != since:
                self._open(node, since)
        if ended:
            self._ends.append((now, len(ended)))
            self._last_end = now
        self._counts.append((now, len(idle_since)))
        for kept in (self._counts, self._ends):
            while kept and kept[0][0] < now - _REMEMBERED_S:
                kept.popleft()
        self._since, self._now, self._wanted = dict(idle_since), now, wanted
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
        """When the gaps were looked at last, epoch seconds."""
        return self._now

    @property
    def idle_since(self) -> Mapping[str, float]:
        """The nodes in a gap, with its begin."""
        return self._since

    def numbers(self, nodes: Sequence[str], now: float) -> Floats:
        """One row a node (each in a gap), one column a name in :data:`NAMES`."""
        count = len(self._since)
        machine = max(1, len(self._nodes))
        share = math.log((count + 1) / (machine + 1))
        before = [math.log((self._ago(now, s) + 1) / (count + 1)) for s in (600.0, 3600.0)]
        ends = [
            math.log1p(sum(n for at, n in self._ends if at > now - s) / (count + 1))
            for s in (600.0, 3600.0)
        ]
        quiet = 3600.0 if self._last_end is None else max(0.0, now - self._last_end)
        youngest = now - max(self._since.values(), default=now)
        hour = datetime.fromtimestamp(now, timezone.utc)
        turn = 2 * math.pi * (hour.hour + hour.minute / 60) / 24
        wanted = self._wanted
        same = [
            share,
            *(max(0.0, share - math.log(knot)) for knot in _IDLE_KNOTS),
            _within(-before[0]),
            _within(-before[1]),
            _within(max(0.0, before[0])),
            *ends,
            math.log1p(min(quiet, 3600.0) / 60.0),
        ]
        calendar = [
            math.log1p(youngest / 60.0),
            math.sin(turn),
            math.cos(turn),
            float(hour.weekday() >= 5),
            0.0 if wanted is None else math.log((wanted + 1) / (count + 1)),
            float(wanted is not None),
        ]
        rows = np.empty((len(nodes), len(NAMES)))
        since = np.array([self._since[node] for node in nodes])
        age = np.log1p(np.maximum(now - since, 0.0) / 60.0)
        rows[:, 0] = 1.0
        rows[:, 1] = age
        for k, knot in enumerate(_AGE_KNOTS):
            rows[:, 2 + k] = np.maximum(0.0, age - math.log1p(knot / 60.0))
        rows[:, 6:16] = same
        together = np.log([self._cohorts[s] for s in since.tolist()]) if len(nodes) else since
        rows[:, 16] = together
        rows[:, 17] = together - math.log(count + 1)
        rows[:, 18] = calendar[0]
        groups = [group_of(node) for node in nodes]
        rows[:, 19] = [self._unlike(self._nodes[node]) for node in nodes]
        rows[:, 20] = [self._unlike(self._groups.get(group)) for group in groups]
        rows[:, 21] = [
            math.log((self._idle_in[g] + 0.5) / (self._group_size[g] + 1)) - share for g in groups
        ]
        rows[:, 22:27] = calendar[1:]
        rows[:, 27] = age * share
        rows[:, 28] = together * age
        return rows

    def _ago(self, now: float, seconds: float) -> int:
        """How many nodes were idle so long ago; the oldest known where that is younger."""
        found = self._counts[0][1] if self._counts else 0
        for at, count in self._counts:
            if at > now - seconds:
                break
            found = count
        return found

    def _remember(self, node: str, length: float) -> None:
        group = self._groups.setdefault(group_of(node), [0.0, 0.0])
        for kept, fade in ((self._nodes[node], _FADE), (group, 0.98), (self._usual, 0.9995)):
            weight = min(kept[1] + 1.0, 1.0 / (1.0 - fade))
            kept[0] += (length - kept[0]) / weight
            kept[1] = weight

    def _unlike(self, kept: Sequence[float] | None) -> float:
        """How much longer (log) its gaps were than the usual ones, drawn to 0 where few are
        known.
        """
        if kept is None or not kept[1]:
            return 0.0
        return _within(kept[1] / (kept[1] + _SHRINK) * (kept[0] - self._usual[0]))

    def to_dict(self) -> dict[str, Any]:
        """What is worth keeping over a restart, as plain values: the usual lengths."""
        nodes = {n: [round(x, 4) for x in kept] for n, kept in self._nodes.items()}
        groups = {n: [round(x, 4) for x in kept] for n, kept in self._groups.items()}
        return {"usual": self._usual, "nodes": nodes, "groups": groups}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> GapMoment:
        """The inverse of :meth:`to_dict`. Raises ValueError, KeyError or TypeError on anything
        else.
        """
        self = cls()
        self._usual = _pair(value["usual"])
        self._nodes = {str(n): _pair(kept) for n, kept in value["nodes"].items()}
        self._groups = {str(n): _pair(kept) for n, kept in value["groups"].items()}
        self._group_size = Counter(map(group_of, self._nodes))
        return self


def group_of(node: str) -> str:
    """The rack, cabinet or blade that a node's name tells: the name without its last number."""
    return node.rstrip("0123456789")


def _within(x: float, most: float = 3.0) -> float:
    return max(-most, min(most, x))


def _pair(kept: Collection[Any]) -> list[float]:
    mean, weight = (float(x) for x in kept)
    if not (math.isfinite(mean) and math.isfinite(weight) and weight >= 0):
        raise ValueError(f"[{mean}, {weight}] is no mean and weight")
    return [mean, weight]
