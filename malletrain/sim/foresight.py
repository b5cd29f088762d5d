"""Forecasts of the remaining time of gaps in a simulation.

Decides the source of forecasts: none, the life table of the past gaps (as in the daemon), or the
trace itself (an upper bound of the benefit of forecasts).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from scavenger.horizon import RATE_WINDOW_S, GapForecast, GapWatch, SurvivalEstimator
from scavenger.trace.trace import Trace

Foresight = Literal["none", "age", "known"]


class Forecaster(Protocol):
    """A source of forecasts of the remaining time of gaps."""

    def update(self, idle_since: Mapping[str, float], now: float) -> None:
        """Note the nodes in a gap at ``now`` and the start of each gap, seconds."""

    def forecasts(self, now: float) -> dict[str, GapForecast]:
        """Return the forecast of each gap of the latest update; ``now`` in seconds."""
        ...


def forecaster(kind: Foresight, trace: Trace) -> Forecaster | None:
    """Return the source of this kind; None for "none".

    Args:
        kind: kind of source.
        trace: trace of idle nodes.
    """
    if kind == "age":
        return AgeForecaster()
    return Oracle(trace) if kind == "known" else None


class AgeForecaster:
    """Forecasts by the daemon's life table, from the age of a gap."""

    def __init__(self) -> None:
        self._watch = GapWatch(SurvivalEstimator())
        self._idle_since: Mapping[str, float] = {}

    def update(self, idle_since: Mapping[str, float], now: float) -> None:
        # Gaps that end now were open until now: the simulation knows their ends exactly.
        self._watch.update(self._idle_since, now)
        self._watch.update(idle_since, now)
        self._idle_since = dict(idle_since)

    def forecasts(self, now: float) -> dict[str, GapForecast]:
        return self._watch.forecasts(now)


class Oracle:
    """Forecasts by the real end of each gap. Gaps that end together are one cohort."""

    def __init__(self, trace: Trace) -> None:
        gaps = trace.gaps()
        self._ends = {
            (trace.names[node], begin): end
            for node, begin, end in zip(
                gaps.node.tolist(), gaps.start.tolist(), gaps.end.tolist(), strict=True
            )
        }
        self._open: dict[str, float] = {}
        """Node in a gap → end of the gap."""

    def update(self, idle_since: Mapping[str, float], now: float) -> None:
        self._open = {node: self._ends[node, since] for node, since in idle_since.items()}

    def forecasts(self, now: float) -> dict[str, GapForecast]:
        by_end = {}
        for end in set(self._open.values()):
            remaining_s = max(end - now, 1e-3)
            end_rate = 1.0 / remaining_s if remaining_s <= RATE_WINDOW_S else 0.0
            by_end[end] = GapForecast(end, remaining_s, end_rate)
        return {node: by_end[end] for node, end in self._open.items()}
