"""What the planner is told of how long gaps last yet, in a simulation.

Decides who foretells: nobody, the life table of the gaps seen so far, the model that the daemon
runs, or (for what foretelling could be worth at best) the trace itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from allocator import Cohort
from malletrain.core.expected_node_life import cohorts
from scavenger.horizon import SurvivalEstimator
from scavenger.lifetimes import EDGES_S, Lifetimes
from scavenger.trace.trace import Trace

Foresight = Literal["none", "age", "lifetimes", "known"]

Foretelling = dict[str, tuple[float, Cohort]]
"""Node → (expected remaining seconds, cohort)"""


class Foreteller(Protocol):
    """Who says how long gaps last yet."""

    def seen(self, idle_since: Mapping[str, float], now: float) -> None:
        """The nodes in a gap, with its begin."""

    def tell(self, idle_since: Mapping[str, float], now: float) -> Foretelling:
        """How long each lasts yet."""
        ...


def foreteller(kind: Foresight, trace: Trace, epoch_s: float) -> Foreteller | None:
    """The one of this kind; ``epoch_s``: when the trace begins, for hours and weekdays."""
    if kind == "age":
        return ByAge()
    if kind == "lifetimes":
        return ByModel(epoch_s)
    return Oracle(trace) if kind == "known" else None


class ByAge:
    """The life table, given the age of a gap."""

    def __init__(self) -> None:
        self._lengths = SurvivalEstimator()
        self._open: dict[str, float] = {}

    def seen(self, idle_since: Mapping[str, float], now: float) -> None:
        for node, since in self._open.items():
            if idle_since.get(node) != since:
                self._lengths.observe(now - since)
        self._open = dict(idle_since)

    def tell(self, idle_since: Mapping[str, float], now: float) -> Foretelling:
        by_start: dict[float, tuple[float, Cohort]] = {}
        for since in set(idle_since.values()):
            age = now - since
            survival = tuple(self._lengths.survival(t, age) for t in EDGES_S)
            by_start[since] = (self._lengths.expected_remaining(age), Cohort(EDGES_S, survival))
        return {node: by_start[since] for node, since in idle_since.items()}


class ByModel:
    """The daemon's model. Gaps that began together are one cohort, of their mean survival."""

    def __init__(self, epoch_s: float) -> None:
        self._epoch_s = epoch_s
        self._lifetimes = Lifetimes()

    def seen(self, idle_since: Mapping[str, float], now: float) -> None:
        begins = {node: since + self._epoch_s for node, since in idle_since.items()}
        self._lifetimes.update(begins, now + self._epoch_s)

    def tell(self, idle_since: Mapping[str, float], now: float) -> Foretelling:
        return cohorts(self._lifetimes.forecast(now + self._epoch_s))


class Oracle:
    """When each gap really ends."""

    def __init__(self, trace: Trace) -> None:
        gaps = trace.gaps()
        self._ends = {
            (trace.names[node], begin): end
            for node, begin, end in zip(
                gaps.node.tolist(), gaps.start.tolist(), gaps.end.tolist(), strict=True
            )
        }

    def seen(self, idle_since: Mapping[str, float], now: float) -> None:
        pass

    def tell(self, idle_since: Mapping[str, float], now: float) -> Foretelling:
        by_end: dict[float, tuple[float, Cohort]] = {}
        foretelling = {}
        for node, since in idle_since.items():
            end = self._ends[node, since]
            if end not in by_end:
                remaining_s = max(end - now, 1e-3)
                by_end[end] = (
                    remaining_s,
                    Cohort((0.0, remaining_s, remaining_s + 1e-3), (1.0, 1.0, 0.0)),
                )
            foretelling[node] = by_end[end]
        return foretelling
