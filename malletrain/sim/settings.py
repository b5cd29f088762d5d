"""What is simulated, and what cannot be."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from malletrain.sim.costs import CostModel
from malletrain.sim.policies import POLICIES, Policy
from malletrain.sim.workloads import WorkloadError


@dataclass(frozen=True)
class SimSettings:
    """What is simulated; times in seconds.

    ``max_running``: jobs at a time. ``starvation_s``: a job waits no longer than this for its
    minimum (infinite: for ever). ``lease_delay_s``: from asking for a lease until the node is
    ready. ``horizons``: tell the controller how long gaps are expected to last, learned from those
    that ended before. ``hours``: stop there (None: where the trace ends). ``seed``: of the noise in
    what profiles measure. ``sample_s``: keep how many nodes were idle and how many had a job, this
    often.
    """

    policy: Policy = POLICIES["malletrain"]
    costs: CostModel = field(default_factory=CostModel)
    max_running: int = 20
    t_fwd_s: float = 120.0
    starvation_s: float = 600.0
    lease_delay_s: float = 0.0
    horizons: bool = False
    hours: float | None = None
    seed: int = 0
    time_limit_s: float = 2.0
    sample_s: float | None = None

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
