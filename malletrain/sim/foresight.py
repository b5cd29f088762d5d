"""Forecasts of the remaining time of gaps, for the planner of a simulation.

Decides the source of forecasts: none, the life table of the past gaps, the model of the daemon, or
the trace itself (an upper bound of the benefit of forecasts).
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
    """A source of forecasts of the remaining time of gaps."""

    def seen(self, idle_since: Mapping[str, float], now: float) -> None:
        """Update the source with the nodes in a gap and the start of each gap."""

    def tell(self, idle_since: Mapping[str, float], now: float) -> Foretelling:
        """Return the forecast of each node."""
        ...


def foreteller(kind: Foresight, trace: Trace, epoch_s: float) -> Foreteller | None:
    """Return the source of this kind; None for "none".

    Args:
        kind: kind of source.
        trace: trace of idle nodes.
        epoch_s: start of the trace, seconds since the epoch, for hours and weekdays.
    """
    if kind == "age":
        return ByAge()
    if kind == "lifetimes":
        return ByModel(epoch_s)
    return Oracle(trace) if kind == "known" else None


class ByAge:
    """Forecasts by the life table, given the age of a gap."""

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
    """Forecasts by the daemon's model. Gaps that began together are a cohort with their mean
    survival.
    """

    def __init__(self, epoch_s: float) -> None:
        self._epoch_s = epoch_s
        self._lifetimes = Lifetimes()

    def seen(self, idle_since: Mapping[str, float], now: float) -> None:
        begins = {node: since + self._epoch_s for node, since in idle_since.items()}
        self._lifetimes.update(begins, now + self._epoch_s)

    def tell(self, idle_since: Mapping[str, float], now: float) -> Foretelling:
        return cohorts(self._lifetimes.forecast(now + self._epoch_s))


class Oracle:
    """Forecasts by the real end of each gap."""

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
