"""The number of nodes for jobs over the last days, from which forecasts are made. Pure.

For each class of nodes it keeps the mean of each span of :data:`SPAN_S`.
:mod:`malletrain.core.forecast` uses it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from allocator import NodeInfo

SPAN_S = 300.0
KEPT = 2016
"""A week."""
_DEFAULT = NodeInfo().node_class


class NodeSpan(NamedTuple):
    """How many nodes of a class there were over one span, on average."""

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
        """From ``now`` on there are so many nodes of each class."""
        if self._began is None:
            self._began = self._at = now
        while now >= self._began + SPAN_S:
            self._pass(self._began + SPAN_S)
            self._close()
        self._pass(now)
        self._now = Counter(nodes)

    def _pass(self, to: float) -> None:
        seconds = max(0.0, to - self._at)
        for name, count in self._now.items():
            self._sums[name] += count * seconds
        self._at = max(self._at, to)

    def _close(self) -> None:
        began = self._began or 0.0
        for name in {*self._sums, *self._spans}:
            span = NodeSpan(began, name, self._sums[name] / SPAN_S)
            self._keep(span)
            self._closed.append(span)
        self._sums.clear()
        self._began = began + SPAN_S

    def _keep(self, span: NodeSpan) -> None:
        self._spans.setdefault(span.node_class, deque(maxlen=KEPT)).append(span.nodes)
        self._arrays.pop(span.node_class, None)

    def restore(self, spans: Iterable[NodeSpan]) -> None:
        """Begin with what was known before; the oldest first. What lies between is not known and
        left out.
        """
        for span in spans:
            self._keep(span)

    def fresh(self) -> list[NodeSpan]:
        """The spans that ended since the last call."""
        closed, self._closed = self._closed, []
        return closed

    def now(self, node_class: str) -> float:
        """How many nodes of the class there are."""
        return float(self._now[node_class])

    def classes(self) -> list[str]:
        """All classes of which there are nodes, or were."""
        return sorted({*self._spans, *(name for name, count in self._now.items() if count)})

    def usual_class(self, may_use: Callable[[str], bool] | None = None) -> str:
        """The class that most nodes are of, among those that may be used (None: all); no class's
        name, where no such node was ever seen.
        """
        means = {name: sum(spans) / len(spans) for name, spans in self._spans.items() if spans}
        counts: Mapping[str, float] = means or self._now
        able = counts if may_use is None else filter(may_use, counts)
        none = _DEFAULT if may_use is None or may_use(_DEFAULT) else ""
        return max(able, key=lambda name: (counts[name], name), default=none)

    def nodes(self, node_class: str) -> npt.NDArray[np.float64]:
        """The spans of a class, the oldest first; the present number alone where there are none."""
        if node_class not in self._arrays:
            spans = self._spans.get(node_class)
            if not spans:
                return np.array([self.now(node_class)])
            self._arrays[node_class] = np.array(spans)
        return self._arrays[node_class]
