"""The events that a shell passes to the controller.

Times are seconds on the shell's clock. Nodes and jobs are identified by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from allocator.bids import Goal, RescaleCost
from allocator.curves import ScalingCurve
from malletrain.core.change_costs import StartCost
from malletrain.core.goals import (
    NO_GOALS,
    NOTHING_SO_FAR,
    GoalsChanged,
    GoalsSoFar,
    OwnerGoals,
    WorkReported,
)
from malletrain.core.goodput import BatchState
from malletrain.core.pools import DEFAULT_CLASS
from malletrain.core.scaling_model import ScalingModel
from scavenger.horizon import GapForecast


class JobState(str, Enum):
    """``queued → running ⇄ profiling | suspended``; each may end in ``completed | failed |
    cancelled``.
    """

    QUEUED = "queued"
    PROFILING = "profiling"
    RUNNING = "running"
    SUSPENDED = "suspended"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)


class Quota(NamedTuple):
    """Maximum number of nodes at once for all jobs under it. ``name``: its name in messages to
    users.
    """

    name: str
    nodes: int


# --- events ---


@dataclass(frozen=True)
class NodeJoined:
    """A leased node is ready for work. ``job``: the job that it already runs, after a restart of
    the daemon.
    """

    node: str
    node_class: str = DEFAULT_CLASS
    horizon_s: float | None = None
    """Expected remaining time of its gap, seconds; None if unknown."""
    group: str | None = None
    """Its topology group; None if unknown."""
    job: str | None = None
    owner: str = ""
    leased_s: float = 0.0
    """Time since the start of its lease, seconds."""


@dataclass(frozen=True)
class NodeLeaving:
    """The main scheduler wants the node back within ``notice_s`` seconds."""

    node: str
    notice_s: float


@dataclass(frozen=True)
class NodeLost:
    """The node is gone, with or without notice before."""

    node: str


@dataclass(frozen=True)
class NodeRejected:
    """The node is alive, but a job's launcher does not start on it. It is released, and not leased
    again for a while.
    """

    node: str


@dataclass(frozen=True)
class GapsSeen:
    """All gaps of the latest poll, which replaces the previous one."""

    gaps: Mapping[str, tuple[float | None, str]]
    """Node → (horizon in seconds or None, node class)."""
    max_new_leases: int | None = None
    """Maximum number of leases that may be requested until the next poll; None for no limit."""


@dataclass(frozen=True)
class ForecastsUpdated:
    """The forecasts of the latest poll, which replace the previous ones."""

    nodes: Mapping[str, GapForecast]
    """Node in a gap, leased or not → forecast of its gap."""


@dataclass(frozen=True)
class PricesChanged:
    """The prices of the site's kinds of slots are known or have changed."""

    prices: Mapping[str, float]
    """Kind → node-seconds that one second of a slot counts; others count 1."""
    unknown: frozenset[str] = frozenset()
    """Kinds whose price is not known yet. Their slots are not charged to budgets meanwhile."""


@dataclass(frozen=True)
class LeaseNotTaken:
    """A lease requested on ``node`` as ``owner`` was not granted, or its agent ended before it
    reported.
    """

    node: str
    owner: str = ""
    failure: str = ""
    """Why the agent ended, as words without a full stop; empty if the lease was not granted."""


@dataclass(frozen=True)
class LeaseDeferred:
    """The lease on ``node`` as ``owner`` was not requested, because the site's limit on the rate of
    requests allows no more before the next poll.
    """

    node: str
    owner: str = ""


@dataclass(frozen=True)
class LeaseUnheard:
    """The lease on ``node`` runs as ``owner``, but its agent has never reported. The node is not
    leased for a while.
    """

    node: str
    owner: str = ""
    failure: str = ""
    """What most likely keeps the agent from reporting, as words without a full stop."""


@dataclass(frozen=True)
class JobSubmitted:
    """A new malleable job, or a stored one after a restart; ``state``: its stored state.

    Attributes:
        min_nodes: minimum number of nodes.
        max_nodes: maximum number of nodes.
        weight: weight in plans.
        goal: throughput, or throughput relative to one node (efficiency).
        curve: scaling curve that the owner states; None if there is none.
        sizes: allowed numbers of nodes; None for every number from min to max.
        tries: number of failures of its workers.
        last_failure_at: time of the last such failure; None if there was none.
        profile: whether to measure its scaling.
        profile_sizes: sizes to measure; None if the user states none.
        scaling: scaling model from before a restart or from other jobs.
        kind: its profile key, if jobs of that key share profiles; empty if it shares with none.
        owner: user on whose nodes it may run; empty if there is only one user.
        goals: deadline, budget and amount of work.
        progress: progress before a restart.
        party: party whose share it uses.
        sweep: its sweep, whose jobs are one entry of the queue; empty if none.
        exempt_from_shares: whether shares never reduce its nodes once it has some (jobs with a
            deadline).
        quotas: its limits.
        trainer: trainer whose plan it is in; empty if there is only one plan.
        node_class: class of nodes, or kind of slots, on which it runs; empty: any one class.
        seeks_layout: whether the best layout of its nodes is being looked for, until
            :class:`LayoutFound`. It is not profiled meanwhile.
    """

    job: str
    min_nodes: int
    max_nodes: int
    weight: float = 1.0
    goal: Goal = Goal.THROUGHPUT
    curve: ScalingCurve | None = None
    sizes: tuple[int, ...] | None = None
    state: JobState = JobState.QUEUED
    tries: int = 0
    last_failure_at: float | None = None
    profile: bool = False
    profile_sizes: tuple[int, ...] | None = None
    scaling: ScalingModel | None = None
    kind: str = ""
    owner: str = ""
    goals: OwnerGoals = NO_GOALS
    progress: GoalsSoFar = NOTHING_SO_FAR
    party: str = ""
    sweep: str = ""
    exempt_from_shares: bool = False
    quotas: tuple[Quota, ...] = ()
    trainer: str = ""
    node_class: str = ""
    seeks_layout: bool = False


@dataclass(frozen=True)
class JobCompleted:
    """All workers of the job have ended without error."""

    job: str


@dataclass(frozen=True)
class WorkersFailed:
    """The job's workers failed by themselves (no node was lost), which uses up a try."""

    job: str
    reason: str
    """Reason as a sentence."""


@dataclass(frozen=True)
class SoftwareLacking:
    """The job's software is not available on any node that was tried, so another try is useless."""

    job: str
    reason: str
    """Reason as a sentence."""


@dataclass(frozen=True)
class RoundInterrupted:
    """A member of the job's round is missing, through no fault of the job. It needs a new round."""

    job: str


BY_ITS_OWNER = "cancelled by its owner"


@dataclass(frozen=True)
class JobCancelled:
    """The job is cancelled."""

    job: str
    reason: str = BY_ITS_OWNER


@dataclass(frozen=True)
class WeightChanged:
    """The owner has changed the weight of the job."""

    job: str
    weight: float


@dataclass(frozen=True)
class LimitsChanged:
    """The owner has changed the node limits of the job. Ignored while it is being profiled."""

    job: str
    min_nodes: int
    max_nodes: int


@dataclass(frozen=True)
class CurveChanged:
    """The job's scaling curve and rescale cost have changed. A job whose curve is 0 everywhere has
    no use for nodes now and gets none.
    """

    job: str
    curve: ScalingCurve
    cost: RescaleCost | None = None
    returns_useless: bool = False
    """Whether it gives nodes back that do not raise its throughput, though no other job needs
    them.
    """


@dataclass(frozen=True)
class StartCostChanged:
    """The expected time until a process of the service is ready has changed."""

    job: str
    start: StartCost


@dataclass(frozen=True)
class DataCached:
    """The training data in the memory of a job's nodes have changed."""

    job: str
    reread_s: Mapping[str, float]
    """Node → time in which the job would read its data again without it, seconds; nodes without
    data are absent.
    """


@dataclass(frozen=True)
class NodesBusy:
    """The nodes on which a farm has tasks. A plan that takes nodes from it takes others first."""

    job: str
    nodes: frozenset[str]


@dataclass(frozen=True)
class Progressed:
    """The job has processed samples."""

    job: str
    nodes: int
    """Number of nodes of the round."""
    time: float
    """Time of the last step as reported by the workers, on the shell's clock."""
    samples: float
    """Samples since the round began."""
    batch: float = 0.0
    """Global batch size; 0 if unknown."""


@dataclass(frozen=True)
class RescaleCostMeasured:
    """A rescale of ``kind`` (``up``, ``down`` or ``start``) has cost the job ``seconds`` without a
    sample.
    """

    job: str
    kind: str
    seconds: float


@dataclass(frozen=True)
class WorkersStarted:
    """All workers of the job's newest round have been started. They may still be starting up."""

    job: str


@dataclass(frozen=True)
class PriorSuggested:
    """A scaling model from other jobs is available for this job. It replaces no measurements."""

    job: str
    scaling: ScalingModel


@dataclass(frozen=True)
class ModelChanged:
    """The job's script reports that it now trains another model, named ``name``. This starts a new
    phase of the scaling curve (:mod:`jpa.curve`).
    """

    job: str
    name: str


@dataclass(frozen=True)
class BatchReported:
    """The job's script states its global batch, which is the same at every scale, or how it follows
    the gradient noise.
    """

    job: str
    batch: BatchState


@dataclass(frozen=True)
class LayoutDue:
    """The job should use its nodes in another layout. Ignored while its nodes change."""

    job: str


@dataclass(frozen=True)
class LayoutFound:
    """The layout of the job's nodes is no longer being looked for. ``changed``: name of the layout
    that it has now, if it is not the one in which the job began; empty if it is. A change starts a
    new phase of the scaling curve.
    """

    job: str
    changed: str = ""


@dataclass(frozen=True)
class RescaleFinished:
    """The job processes samples at its new scale (or its start-up time limit passed)."""

    job: str


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    NodeJoined
    | ForecastsUpdated
    | NodeLeaving
    | NodeLost
    | NodeRejected
    | GapsSeen
    | PricesChanged
    | LeaseNotTaken
    | LeaseDeferred
    | LeaseUnheard
    | JobSubmitted
    | JobCompleted
    | WorkersFailed
    | SoftwareLacking
    | RoundInterrupted
    | JobCancelled
    | WeightChanged
    | LimitsChanged
    | CurveChanged
    | StartCostChanged
    | DataCached
    | NodesBusy
    | Progressed
    | RescaleCostMeasured
    | WorkersStarted
    | PriorSuggested
    | ModelChanged
    | BatchReported
    | LayoutDue
    | LayoutFound
    | RescaleFinished
    | GoalsChanged
    | WorkReported
    | Tick
)
