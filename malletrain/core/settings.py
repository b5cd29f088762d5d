"""The settings of the controller, its planner and its profiler. The defaults are in
:mod:`malletrain.core.defaults`. Times in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from allocator import RescaleCost
from jpa import AdvisorConfig, PlanConfig
from malletrain.core import defaults
from malletrain.core.trainers import Trainer


@dataclass(frozen=True)
class PlanningSettings:
    """How plans are made."""

    t_fwd_s: float = defaults.T_FWD_S
    """Forward-looking time: a change of scale must pay within it."""
    cost: RescaleCost = field(
        default_factory=lambda: RescaleCost(
            defaults.RESCALE_UP_S, defaults.RESCALE_DOWN_S, defaults.START_S
        )
    )
    """What a change of scale is taken to cost until it was measured."""
    max_running: int = defaults.MAX_RUNNING
    time_limit_s: float = defaults.TIME_LIMIT_S
    prior_exponent: float = defaults.PRIOR_EXPONENT
    """An unmeasured job is taken to speed up as nodes**exponent."""

    look_ahead_s: float | None = None
    """So far ahead it is looked where it is foretold how long nodes last; None: nothing is."""
    heed_lifetimes: bool = False
    """Bids heed it, too; else only how often jobs save, and which nodes they get."""
    lost_work_s: float = defaults.LOST_WORK_S
    """Work that is lost with a node that goes without notice, seconds."""

    def start_pays(self, cost: RescaleCost | None = None) -> bool:
        """Whether a start can bring more than it costs within the time looked ahead; ``cost``: of
        the job, None: nothing is known of it.
        """
        return (cost or self.cost).start_s < self.t_fwd_s

    def caution(self, starvation_s: float) -> str | None:
        """A sentence when a start is taken to cost more than it can bring within the
        forward-looking time; else None.
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
    precision: float = defaults.PRECISION,
    min_time_s: float = defaults.MIN_MEASURE_S,
    max_time_s: float = defaults.MAX_MEASURE_S,
    max_profile_s: float = defaults.MAX_PROFILE_S,
    rescale_timeout_s: float = defaults.RESCALE_TIMEOUT_S,
    donor_quiet_s: float = defaults.DONOR_QUIET_S,
    patience_s: float = defaults.PATIENCE_S,
    max_steps: int = defaults.MAX_SIZES,
) -> AdvisorConfig:
    """The advisor's limits in the words of the site's configuration."""
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
        patience_s=patience_s,
    )


@dataclass(frozen=True)
class ProfilingSettings:
    """How jobs are profiled."""

    advisor: AdvisorConfig = field(default_factory=advisor_config)
    kappa: float = defaults.KAPPA
    """The bids of a profiled job are lowered by this many standard deviations."""
    when_worth: bool = True
    """A job is profiled when what that tells is expected to be worth more than it costs; else
    always.
    """
    every_size_up_to: int = defaults.EVERY_SIZE_UP_TO
    """A job with so few sizes is measured at each of them."""
    window_s: float = defaults.OBSERVE_EVERY_S
    """Length of the windows in which a running job is observed."""
    lease_patience_s: float = defaults.LEASE_PATIENCE_S
    """How long a profile waits for nodes before it begins on fewer than the job can use."""
    silence_s: float = defaults.SILENCE_S
    """Workers that have been started and report nothing for so long are measured all the same."""
    again_s: float = defaults.MAX_PROFILE_S
    """A profile that could not have all sizes is repeated after so long at the earliest, once they
    are there.
    """


@dataclass(frozen=True)
class ShareSettings:
    """How shares are counted (:mod:`malletrain.core.shares`)."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Party → weight, above 0."""
    others: float = 1.0
    """The weight of a party that is not named."""
    half_life_s: float = defaults.SHARES_HALF_LIFE_S
    """What was counted so long ago counts half."""
    double_after_s: float = defaults.SHARES_DOUBLE_AFTER_S
    """Bids count double when their party is behind by so many seconds of its due service."""
    classes: Mapping[str, float] = field(default_factory=dict)
    """Class of nodes → what a second of one of its nodes counts; 1 for those not named."""

    def weight(self, party: str) -> float:
        """The weight of a party."""
        return self.weights.get(party, self.others)


@dataclass(frozen=True)
class ControllerSettings:
    """How patient the controller is."""

    planning: PlanningSettings = field(default_factory=PlanningSettings)
    debounce_s: float = defaults.DEBOUNCE_S
    """Node events this close together are one plan."""
    arrival_s: float = defaults.ARRIVAL_S
    """A plan for a node that joined waits so long for others of its owner that are on their way: a
    job that begins without them would be rescaled at once.
    """
    notice_debounce_s: float = defaults.NOTICE_DEBOUNCE_S
    """The same for notices of preemptions, for whose nodes the main scheduler's jobs wait."""
    idle_debounce_s: float = defaults.IDLE_DEBOUNCE_S
    """The same where idle nodes are of use at once: those that are left of a job that lost one, or
    all there are, since jobs wait for them.
    """
    min_interval_s: float = defaults.MIN_INTERVAL_S
    """A job that nothing forces is rescaled no more often than this."""
    starvation_s: float = defaults.STARVATION_S
    """An admitted job that waits for its first nodes for so long gets its minimum, and keeps it for
    as long.
    """
    turns_apart: float = defaults.TURNS_APART
    """The same for a job that had nodes before: so many times as long."""
    max_tries: int = defaults.MAX_TRIES
    """The job has failed when its workers failed so many times."""
    retry_window_s: float = defaults.RETRY_WINDOW_S
    """Failures further apart than this do not add up."""
    release_after_s: float = defaults.RELEASE_AFTER_S
    """A lease nobody uses is released."""
    min_horizon_s: float = defaults.MIN_HORIZON_S
    """Shorter gaps are not worth a lease."""
    lease_wait_s: float = defaults.LEASE_WAIT_S
    """A lease asked for that has not come up by then is forgotten."""
    rejected_s: float = defaults.REJECTED_S
    """A node on which no launcher comes up is left alone for so long."""
    reclaim_s: float = defaults.RECLAIM_S
    """A job may take so long to move off a node that another owner's job has more use for."""
    reclaim_every_s: float = defaults.RECLAIM_EVERY_S
    """Nodes are taken from one owner for another no more often than this."""
    reclaim_way_s: float = defaults.RECLAIM_WAY_S
    """How long such a node is taken to be on its way from lease to lease, until it was seen."""
    min_charge_s: float = defaults.MIN_CHARGE_S
    """What the site charges for a lease at least, however short it was."""
    charge_factor: float = defaults.CHARGE_FACTOR
    """What the site charges for a node-second of a lease."""
    deadline_weight: float = defaults.DEADLINE_WEIGHT
    """A node that a deadline needs counts at most so many times what it would bring another job."""
    deadline_ahead: float = defaults.DEADLINE_AHEAD
    """What samples beyond a deadline's need count, beside those of other jobs."""
    min_lease_s: float = defaults.MIN_LEASE_S
    """The site wants no shorter leases."""
    max_leases_per_owner: int = defaults.MAX_LEASES_PER_OWNER
    """Leases of one owner at once at most; 0: any number."""
    profiling: ProfilingSettings | None = None
    """How jobs are profiled; None: they are not."""
    shares: ShareSettings | None = None
    """How much of the nodes is due to whom; None: nobody counts."""
    trainers: tuple[Trainer, ...] = ()
    """Each has a plan of its own; the last one takes the jobs of whom no other names. None: there
    is one plan.
    """

    @property
    def due_s(self) -> float:
        """How long a lease should last: what is charged for it anyway, or what the site wants."""
        return max(self.min_charge_s, self.min_lease_s)

    def notice_wait(self, in_s: float) -> float:
        """Seconds to wait for further notices when a node leaves in ``in_s`` seconds."""
        return min(self.debounce_s, self.notice_debounce_s, in_s / 4)
