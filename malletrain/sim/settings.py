"""Settings of a simulation, and their validation. The settings of the controller are MalleTrain's
defaults or those of a site.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from malletrain.core import defaults
from malletrain.core.settings import ControllerSettings, PlanningSettings
from malletrain.sim.foresight import Foresight
from malletrain.sim.model_jobs import CostModel
from malletrain.sim.policies import POLICIES, Policy
from malletrain.sim.workloads import WorkloadError


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
