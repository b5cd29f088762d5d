"""Settings of a simulation, and their validation. The settings of the controller are MalleTrain's
defaults or those of a site.

Decides also the source of the forecasts of the remaining time of gaps: none, the life table of the
past gaps (as in the daemon), or the trace itself (an upper bound of the benefit of forecasts).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from malletrain.core import defaults
from malletrain.core.settings import ControllerSettings, PlanningSettings
from malletrain.sim.model_jobs import CostModel
from malletrain.sim.policies import POLICIES, Policy
from malletrain.sim.workloads import WorkloadError
from scavenger.horizon import RATE_WINDOW_S, GapForecast, GapWatch, SurvivalEstimator
from scavenger.trace.trace import Trace


@dataclass(frozen=True)
class SimSettings:
    """Settings of one simulation; times in seconds."""

    policy: Policy = POLICIES["malletrain"]
    costs: CostModel = field(default_factory=CostModel)
    max_running: int = defaults.MAX_RUNNING
    """Maximum number of admitted jobs."""
    t_fwd_s: float = defaults.T_FWD_S
    """Forward-looking time."""
    starvation_s: float = defaults.STARVATION_S
    """Maximum time that a job waits for its minimum, the first time; infinite for no limit."""
    lease_delay_s: float = 0.0
    """Time from the request of a lease until the node is ready."""
    foresight: Foresight = "none"
    """Source of forecasts of the remaining time of gaps."""
    hours: float | None = None
    """Maximum simulated time, hours; None for the whole trace."""
    seed: int = 0
    """Seed of the noise in measurements."""
    time_limit_s: float = PlanningSettings.time_limit_s
    """Time limit of the solver."""
    sample_s: float | None = None
    """Interval at which the numbers of idle nodes and of nodes with a job are recorded; None for
    never.
    """
    revealed: bool = False
    """Whether a job's true curve becomes known when it first runs: a lower bound of the cost of
    measuring it.
    """
    sized: bool = False
    """Whether owners state the size of their models at submission, so that a job starts with a
    prior from similar ones. If not, its workers report the size when it first runs.
    """
    site: ControllerSettings = field(default_factory=ControllerSettings)
    """The other settings of the controller."""

    def controller(self) -> ControllerSettings:
        """Return the settings of the controller."""
        planning = replace(
            self.site.planning,
            t_fwd_s=self.t_fwd_s,
            max_running=self.max_running,
            time_limit_s=self.time_limit_s,
        )
        return replace(self.site, planning=planning, starvation_s=self.starvation_s)

    def __post_init__(self) -> None:
        if self.max_running < 1:
            raise WorkloadError(
                f"{self.max_running} jobs at a time cannot be simulated; give 1 or more."
            )
        if not (math.isfinite(self.t_fwd_s) and self.t_fwd_s > 0):
            raise WorkloadError(
                f"The forward-looking time is {self.t_fwd_s} s; give a number above 0."
            )
        if not (math.isfinite(self.lease_delay_s) and self.lease_delay_s >= 0):
            raise WorkloadError(f"The delay of a lease is {self.lease_delay_s} s; give 0 or more.")
        if not self.starvation_s > 0:
            raise WorkloadError(
                f"A job cannot starve after {self.starvation_s} s; give a number above 0, or inf."
            )
        if self.hours is not None and not self.hours > 0:
            raise WorkloadError(f"{self.hours} hours cannot be simulated; give a number above 0.")

    def caution(self) -> str | None:
        """Return a warning about valid settings with which hardly any job runs; else None."""
        return self.policy.caution(self.policy.world(self.costs), self.t_fwd_s, self.starvation_s)


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
