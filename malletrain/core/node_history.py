"""History of the number of nodes over the last days, the basis of forecasts. Pure.

It keeps the mean number of nodes of each class for each span of :data:`SPAN_S` seconds.
:mod:`malletrain.core.forecast` uses it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from malletrain.core.pools import DEFAULT_CLASS

SPAN_S = 300.0
MAX_SPANS = 2016
"""Number of spans that are kept: a week."""


class NodeSpan(NamedTuple):
    """Mean number of nodes of a class over one span."""

    began: float
    node_class: str
    nodes: float


class NodeHistory:
    """The nodes of each class over time: leased ones, and gaps that may be leased."""

    def __init__(self) -> None:
        self._spans: dict[str, deque[float]] = {}
        self._last: dict[str, float] = {}
        self._now: Counter[str] = Counter()
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._began: float | None = None
        self._at = 0.0
        self._closed: list[NodeSpan] = []
        self._arrays: dict[str, npt.NDArray[np.float64]] = {}

    def feed(self, nodes: Mapping[str, int], now: float) -> None:
        """Set the number of nodes of each class from ``now`` on."""
        if self._began is None:
            self._began = self._at = now
        while now >= self._began + SPAN_S:
            self._pass(self._began + SPAN_S)
            self._close()
        self._pass(now)
        self._now = Counter(nodes)

    def _pass(self, end: float) -> None:
        seconds = max(0.0, end - self._at)
        for name, count in self._now.items():
            self._sums[name] += count * seconds
        self._at = max(self._at, end)

    def _close(self) -> None:
        began = self._began or 0.0
        for name in {*self._sums, *self._spans}:
            span = NodeSpan(began, name, self._sums[name] / SPAN_S)
            self._keep(span)
            self._closed.append(span)
        self._sums.clear()
        self._began = began + SPAN_S

    def _keep(self, span: NodeSpan) -> None:
        self._spans.setdefault(span.node_class, deque(maxlen=MAX_SPANS)).append(span.nodes)
        self._arrays.pop(span.node_class, None)

    def restore(self, spans: Iterable[NodeSpan]) -> None:
        """Restore stored spans, the oldest first. The time since the last one is left out, because
        it is unknown.
        """
        for span in spans:
            self._keep(span)

    def fresh(self) -> list[NodeSpan]:
        """Return the spans that have ended since the last call."""
        closed, self._closed = self._closed, []
        return closed

    def now(self, node_class: str) -> float:
        """Return the current number of nodes of the class."""
        return float(self._now[node_class])

    def classes(self) -> list[str]:
        """Return all classes that have or had nodes."""
        return sorted({*self._spans, *(name for name, count in self._now.items() if count)})

    def usual_class(self, may_use: Callable[[str], bool] | None = None) -> str:
        """Return the class with the most nodes on average, among those for which ``may_use`` is
        true (None: all). If no such node was ever present, return the default class, or "" if it
        may not be used.
        """
        means = {name: sum(spans) / len(spans) for name, spans in self._spans.items() if spans}
        counts: Mapping[str, float] = means or self._now
        usable = counts if may_use is None else filter(may_use, counts)
        fallback = DEFAULT_CLASS if may_use is None or may_use(DEFAULT_CLASS) else ""
        return max(usable, key=lambda name: (counts[name], name), default=fallback)

    def nodes(self, node_class: str) -> npt.NDArray[np.float64]:
        """Return the means of a class, the oldest first; only the current number if there are
        none.
        """
        if node_class not in self._arrays:
            spans = self._spans.get(node_class)
            if not spans:
                return np.array([self.now(node_class)])
            self._arrays[node_class] = np.array(spans)
        return self._arrays[node_class]
