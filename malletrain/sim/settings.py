"""What is simulated, and what cannot be. How the controller is set up is the product's decision:
its defaults, or a site's own settings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from malletrain.core import defaults
from malletrain.core.settings import ControllerSettings
from malletrain.sim.costs import CostModel
from malletrain.sim.foresight import Foresight
from malletrain.sim.policies import POLICIES, Policy
from malletrain.sim.workloads import WorkloadError


@dataclass(frozen=True)
class SimSettings:
    """What is simulated; times in seconds."""

    policy: Policy = POLICIES["malletrain"]
    costs: CostModel = field(default_factory=CostModel)
    max_running: int = defaults.MAX_RUNNING
    """Jobs at a time."""
    t_fwd_s: float = defaults.T_FWD_S
    starvation_s: float = defaults.STARVATION_S
    """A job waits no longer than this for its minimum, the first time (infinite: for ever)."""
    lease_delay_s: float = 0.0
    """From asking for a lease until the node is ready."""
    horizons: bool = False
    """Tell the controller how long gaps are expected to last, learned from those that ended
    before.
    """
    foresight: Foresight = "none"
    """Who foretells how long gaps last yet."""
    heed_lifetimes: bool = False
    """Bids heed it, too; else only how often jobs save, and which nodes they get."""
    epoch_s: float = 0.0
    """When the trace begins, seconds since the epoch, for hours and weekdays."""
    hours: float | None = None
    """Stop there; None: where the trace ends."""
    seed: int = 0
    """Of the noise in what profiles measure."""
    time_limit_s: float = defaults.TIME_LIMIT_S
    sample_s: float | None = None
    """Keep how many nodes were idle and how many had a job, this often."""
    revealed: bool = False
    """A job's true curve becomes known when it first runs: what finding out costs at least, for who
    has to run a job to know it.
    """
    sized: bool = False
    """Owners say beforehand how large their models are, so that a job begins with what similar ones
    suggest; else its workers say it when it first runs.
    """
    site: ControllerSettings = field(default_factory=ControllerSettings)
    """Everything else that the controller is told."""

    @property
    def foretells(self) -> Foresight:
        """Who foretells; with ``horizons`` alone bids do not heed it."""
        return "age" if self.horizons and self.foresight == "none" else self.foresight

    def controller(self) -> ControllerSettings:
        """What the controller is told."""
        planning = replace(
            self.site.planning,
            t_fwd_s=self.t_fwd_s,
            max_running=self.max_running,
            time_limit_s=self.time_limit_s,
        )
        if self.foresight != "none" and planning.look_ahead_s is None:
            work_s = self.costs.work_at_risk_s
            heed = self.heed_lifetimes or planning.heed_lifetimes
            planning = replace(
                planning, look_ahead_s=self.t_fwd_s, lost_work_s=work_s, heed_lifetimes=heed
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
        """A sentence about settings that make sense and yet hardly let a job run; else None."""
        return self.policy.caution(self.policy.world(self.costs), self.t_fwd_s, self.starvation_s)
