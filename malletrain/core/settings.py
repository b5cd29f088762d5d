"""The settings of the controller, its planner and its profiler, with their defaults, which the
site's configuration has too. Those that the command line of the simulator shows are in
:mod:`malletrain.core.defaults`. Times in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from allocator import RescaleCost
from jpa import AdvisorConfig, PlanConfig
from malletrain.core import defaults
from malletrain.core.pools import Trainer

PRECISION = 0.05
MIN_MEASURE_S = 5.0
MAX_MEASURE_S = 60.0
MAX_PROFILE_S = 600.0
RESCALE_TIMEOUT_S = 120.0
DONOR_QUIET_S = 60.0
PATIENCE_S = 60.0
MAX_SIZES = 8
"""Defaults of the advisor's settings (:func:`advisor_config`)."""


@dataclass(frozen=True)
class PlanningSettings:
    """Settings of the planner."""

    t_fwd_s: float = defaults.T_FWD_S
    """Forward-looking time: a rescale must pay within it."""
    cost: RescaleCost = field(
        default_factory=lambda: RescaleCost(
            defaults.RESCALE_UP_S, defaults.RESCALE_DOWN_S, defaults.START_S
        )
    )
    """Assumed cost of a rescale until one is measured."""
    max_running: int = defaults.MAX_RUNNING
    """Maximum number of admitted jobs."""
    time_limit_s: float = 2.0
    """Time limit of the solver."""
    prior_exponent: float = 0.9
    """Assumed scaling of unmeasured jobs: nodes**exponent."""

    def start_pays(self, cost: RescaleCost | None = None) -> bool:
        """Return whether a start can bring more than it costs within the forward-looking time.
        ``cost``: measured costs of the job, or None.
        """
        return (cost or self.cost).start_s < self.t_fwd_s

    def caution(self, starvation_s: float) -> str | None:
        """Return a warning if a start costs more than it can bring within the forward-looking time;
        else None.
        """
        if self.start_pays():
            return None
        return (
            f"A start is taken to cost {self.cost.start_s:g} s and plans look {self.t_fwd_s:g} "
            "s ahead, so no start pays for itself: "
            f"a job gets nodes only once it has waited for {starvation_s:g} s. Look further "
            f"ahead than {self.cost.start_s:g} s."
        )


def advisor_config(
    *,
    precision: float = PRECISION,
    min_time_s: float = MIN_MEASURE_S,
    max_time_s: float = MAX_MEASURE_S,
    max_profile_s: float = MAX_PROFILE_S,
    rescale_timeout_s: float = RESCALE_TIMEOUT_S,
    donor_quiet_s: float = DONOR_QUIET_S,
    max_wait_for_nodes_s: float = PATIENCE_S,
    max_steps: int = MAX_SIZES,
) -> AdvisorConfig:
    """Return the advisor's configuration from the values of the site's configuration."""
    base = AdvisorConfig()
    measure = replace(
        base.measure,
        tolerance=precision,
        min_seconds=min_time_s,
        max_seconds=max_time_s,
        warmup_s=min(base.measure.warmup_s, min_time_s / 4),
    )
    return replace(
        base,
        plan=PlanConfig(
            max_steps=max_steps, refine_steps=min(base.plan.refine_steps, max_steps - 1)
        ),
        measure=measure,
        max_profile_s=max_profile_s,
        rescale_timeout_s=rescale_timeout_s,
        donor_quiet_s=donor_quiet_s,
        max_wait_for_nodes_s=max_wait_for_nodes_s,
    )


@dataclass(frozen=True)
class ProfilingSettings:
    """Settings of the profiler."""

    advisor: AdvisorConfig = field(default_factory=advisor_config)
    kappa: float = 0.5
    """Number of standard deviations by which the bids of a profiled job are lowered."""
    when_worth: bool = True
    """Whether a job is profiled only if the expected value of the result exceeds its cost. If not,
    every job is profiled.
    """
    every_size_up_to: int = 8
    """A job with at most this number of sizes is measured at each of them."""
    window_s: float = 30.0
    """Length of the windows in which a running job's throughput is measured."""
    lease_patience_s: float = 5.0
    """Maximum time that a profile waits for nodes before it starts on fewer than the job can
    use.
    """
    silence_s: float = 60.0
    """Maximum time to wait for a report of workers that have been started. Then the measurement
    starts without one.
    """
    again_s: float = MAX_PROFILE_S
    """Minimum time before a profile that lacked nodes for some sizes is repeated, once the nodes
    are available.
    """


@dataclass(frozen=True)
class ShareSettings:
    """Settings of fair shares (:mod:`malletrain.core.shares`)."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Party → weight, above 0."""
    others: float = 1.0
    """Weight of the other parties."""
    half_life_s: float = 7 * 86400.0
    """Half-life of the counters. The default is that of Slurm's fair share."""
    double_after_s: float = 4 * 3600.0
    """Seconds of due service by which a party is behind when its bids count double."""
    classes: Mapping[str, float] = field(default_factory=dict)
    """Class of nodes → weight of one of its node-seconds; 1 for other classes."""

    def weight(self, party: str) -> float:
        """Return the weight of a party."""
        return self.weights.get(party, self.others)


@dataclass(frozen=True)
class ControllerSettings:
    """Settings of the controller."""

    planning: PlanningSettings = field(default_factory=PlanningSettings)
    debounce_s: float = 1.0
    """Time to wait for further node events before a plan."""
    arrival_s: float = 2.0
    """Time that a plan for a joined node waits for others of its owner that are on their way. A job
    that starts without them would be rescaled at once. Leases taken together start within one or
    two seconds of each other.
    """
    notice_debounce_s: float = 0.3
    """Time to wait for further notices of preemption. It is short, because the main scheduler's
    jobs wait for the nodes. Notices of one preemption come within some tenths of a second (measured
    on 64 nodes).
    """
    idle_debounce_s: float = 0.1
    """Time to wait if jobs can use idle nodes at once: the remaining nodes of a job that lost one,
    or nodes for which jobs wait.
    """
    min_interval_s: float = 30.0
    """Minimum time between two rescales of a job that are not forced."""
    starvation_s: float = defaults.STARVATION_S
    """Time that an admitted job waits for its first nodes before it starves. Then it gets its
    minimum and keeps it for the same time.
    """
    turns_apart: float = 12.0
    """Factor on ``starvation_s`` for a job that had nodes before. A turn lasts as long as the first
    wait, so a job gets at most one thirteenth of the time from turns. Their costs and benefits are
    in docs/allocation.md.
    """
    max_tries: int = 3
    """Number of tries after which a job has failed."""
    retry_window_s: float = 3600.0
    """Time without a failure after which the count of tries restarts."""
    release_after_s: float = 30.0
    """Time after which an unused lease is released."""
    min_horizon_s: float = 0.0
    """Minimum expected duration of a gap for a lease."""
    lease_wait_s: float = 120.0
    """Time after which a requested lease that has not started is forgotten."""
    rejected_s: float = 300.0
    """Time for which no lease is taken on a node after a launcher did not start there."""
    reclaim_s: float = 25.0
    """Maximum time for a job to leave a node that is reclaimed."""
    reclaim_every_s: float = 60.0
    """Minimum time between two reclaims."""
    reclaim_way_s: float = 5.0
    """Assumed time of a reclaimed node between two leases, until one is measured. The default is
    without the main scheduler's cycle.
    """
    min_charge_s: float = 0.0
    """Minimum time that the site charges for a lease."""
    charge_factor: float = 1.0
    """Charged node-seconds per node-second of a lease."""
    deadline_weight: float = 4.0
    """Maximum ratio of the value of a node that a deadline needs to its value for another job."""
    deadline_ahead: float = 0.9
    """Weight of samples beyond a deadline's need, relative to those of other jobs."""
    min_lease_s: float = 0.0
    """Minimum duration of a lease that the site wants."""
    whole_host_classes: frozenset[str] = frozenset()
    """Classes of slots of which a job of the main scheduler has all those of a host, so that they
    are leased and given back together.
    """
    max_leases_per_owner: int = 0
    """Maximum number of leases of one owner at once; 0 for no limit."""
    profiling: ProfilingSettings | None = None
    """Settings of the profiler; None if jobs are not profiled."""
    shares: ShareSettings | None = None
    """Settings of fair shares; None without shares."""
    trainers: tuple[Trainer, ...] = ()
    """Trainers, each with its own plan. The last one takes the jobs of users whom no other names.
    If empty, there is one plan.
    """

    @property
    def due_s(self) -> float:
        """Minimum useful duration of a lease, seconds: the minimum charge or the site's minimum,
        whichever is longer.
        """
        return max(self.min_charge_s, self.min_lease_s)

    def notice_wait(self, notice_s: float) -> float:
        """Return the seconds to wait for further notices if a node leaves in ``notice_s``."""
        return min(self.debounce_s, self.notice_debounce_s, notice_s / 4)
