"""The events that a shell passes to the controller.

Times are seconds on the shell's clock; nodes and jobs are named by text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from allocator.curves import ScalingCurve
from allocator.objectives import Goal, RescaleCost
from allocator.survival import Cohort
from malletrain.core.goals import (
    NO_GOALS,
    NOTHING_SO_FAR,
    GoalsChanged,
    GoalsSoFar,
    OwnerGoals,
    WorkReported,
)
from malletrain.core.scaling_model import ScalingModel


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
    """The most nodes at once for all jobs that are under it. ``name``: for people."""

    name: str
    nodes: int


# --- events ---


@dataclass(frozen=True)
class NodeJoined:
    """A leased node is ready for work. ``job``: what it already runs (adoption after a restart of
    the daemon).
    """

    node: str
    node_class: str = "default"
    horizon_s: float | None = None
    group: str | None = None
    job: str | None = None
    owner: str = ""
    leased_s: float = 0.0
    """How long its lease runs already."""


@dataclass(frozen=True)
class NodeLeaving:
    """The main scheduler wants the node back within ``in_s`` seconds."""

    node: str
    in_s: float


@dataclass(frozen=True)
class NodeLost:
    """The node is gone, with or without notice before."""

    node: str


@dataclass(frozen=True)
class NodeRejected:
    """The node is alive, but a job's launcher does not come up on it: release it and leave it
    alone for a while.
    """

    node: str


@dataclass(frozen=True)
class GapsSeen:
    """All gaps of the latest poll: node → (horizon in seconds or None, node class). Replaces the
    poll before. ``room``: leases that may be asked for until the next one, None: any number.
    """

    gaps: Mapping[str, tuple[float | None, str]]
    room: int | None = None


@dataclass(frozen=True)
class Foretold:
    """How long nodes in a gap, leased or not, are expected to last still: node → (horizon in
    seconds, its cohort). Those that are not named stay as they were.
    """

    nodes: Mapping[str, tuple[float, Cohort]]


@dataclass(frozen=True)
class LeaseNotTaken:
    """A lease asked for on ``node`` as ``owner`` did not come about."""

    node: str
    owner: str = ""


@dataclass(frozen=True)
class LeaseNotYet:
    """The lease on ``node`` as ``owner`` was not asked for: the site's pace allows no more before
    the next poll.
    """

    node: str
    owner: str = ""


@dataclass(frozen=True)
class LeaseUnheard:
    """The lease on ``node`` runs as ``owner``, and its agent never reported: leave the node alone
    for a while.
    """

    node: str
    owner: str = ""


@dataclass(frozen=True)
class JobSubmitted:
    """A new malleable job, or after a restart one that the store knows (``state`` says where it
    stood).

    ``sizes``: allowed numbers of nodes, ``None`` for every one in [min, max]. ``tries`` and
    ``last_broke``: how often its workers broke, and when they last did. ``profile``: measure how it
    scales, at ``profile_sizes`` where the user names them. ``scaling``: what is known of its
    scaling from before a restart or from other jobs. ``kind``: jobs of one kind scale alike, so
    that what the profile of one finds the others need not measure; empty: it is the only one.
    ``owner``: on whose nodes alone it may run; empty where there is one user only. ``party``: whose
    share it is served from. ``sweep``: jobs of one sweep are one entry of the queue; empty: it is
    in none. ``whole``: shares do not cut it once it has nodes. ``quotas``: the
    limits it is under. ``goals``: what its owner wants beyond speed; ``so_far``: how far it had
    come before a restart. ``trainer``: in whose plan it is; empty where there is one only.
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
    last_broke: float | None = None
    profile: bool = False
    profile_sizes: tuple[int, ...] | None = None
    scaling: ScalingModel | None = None
    kind: str = ""
    owner: str = ""
    goals: OwnerGoals = NO_GOALS
    so_far: GoalsSoFar = NOTHING_SO_FAR
    party: str = ""
    sweep: str = ""
    whole: bool = False
    quotas: tuple[Quota, ...] = ()
    trainer: str = ""


@dataclass(frozen=True)
class JobCompleted:
    """Every worker of the job ended well."""

    job: str


@dataclass(frozen=True)
class WorkersFailed:
    """The job's workers failed by themselves (no node was lost): one try is used up."""

    job: str
    reason: str


@dataclass(frozen=True)
class SoftwareLacking:
    """The job's software cannot be had on any node that was tried: no further try is of use."""

    job: str
    reason: str


@dataclass(frozen=True)
class RoundInterrupted:
    """The job's workers are not one whole round any more and it is not the job's fault: form a new
    one.
    """

    job: str


BY_ITS_OWNER = "cancelled by its owner"


@dataclass(frozen=True)
class JobCancelled:
    """It is not to go on, whatever it has reached."""

    job: str
    reason: str = BY_ITS_OWNER


@dataclass(frozen=True)
class JobWeighed:
    """Its owner says anew how much it counts beside the others."""

    job: str
    weight: float


@dataclass(frozen=True)
class LimitsChanged:
    """Its owner wants other limits of its scale. Not of a job that is being profiled."""

    job: str
    min_nodes: int
    max_nodes: int


@dataclass(frozen=True)
class CurveLearned:
    """What is now known of the job's scaling and rescale cost."""

    job: str
    curve: ScalingCurve
    cost: RescaleCost | None = None


@dataclass(frozen=True)
class Progressed:
    """Samples were processed on ``nodes`` nodes: ``samples`` since the round began, up to ``time``
    (the workers' own time of the last of them, on the clock of ``now``), in steps of ``batch`` over
    all ranks.
    """

    job: str
    nodes: int
    time: float
    samples: float
    batch: float = 0.0


@dataclass(frozen=True)
class RescaleCosted:
    """A rescale of ``kind`` (``up``, ``down`` or ``start``) cost the job ``seconds`` without a
    sample.
    """

    job: str
    kind: str
    seconds: float


@dataclass(frozen=True)
class RoundFormed:
    """All workers of the job's newest round have been started; whether they process samples is not
    known yet.
    """

    job: str


@dataclass(frozen=True)
class PriorSuggested:
    """What other jobs suggest of this job's scaling, found out late; it does not take the place of
    anything measured.
    """

    job: str
    scaling: ScalingModel


@dataclass(frozen=True)
class ModelChanged:
    """The job's script says that it trains another model than before, of this ``name``: a phase of
    its own.
    """

    job: str
    name: str


@dataclass(frozen=True)
class RescaleFinished:
    """The job processes samples at its new scale (or its start-up time limit passed)."""

    job: str


@dataclass(frozen=True)
class Tick:
    """Time passed."""


Event = (
    NodeJoined
    | Foretold
    | NodeLeaving
    | NodeLost
    | NodeRejected
    | GapsSeen
    | LeaseNotTaken
    | LeaseNotYet
    | LeaseUnheard
    | JobSubmitted
    | JobCompleted
    | WorkersFailed
    | SoftwareLacking
    | RoundInterrupted
    | JobCancelled
    | JobWeighed
    | LimitsChanged
    | CurveLearned
    | Progressed
    | RescaleCosted
    | RoundFormed
    | PriorSuggested
    | ModelChanged
    | RescaleFinished
    | GoalsChanged
    | WorkReported
    | Tick
)
