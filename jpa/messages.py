"""The messages between the controller and the advisor: events in, answers out.

Decides nothing. What the advisor does with an event is decided in :mod:`jpa.advisor`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from jpa.curve import MeasuredCurve
from jpa.donors import Donor
from jpa.measure import Measurement
from jpa.phase import Prior

# --- events ---


@dataclass(frozen=True)
class ProfileRequested:
    """A request to measure a job's curve. A job that waits for its profile or is being profiled is
    not queued again.
    """

    job: str
    """Its name."""
    min_nodes: int
    """Minimum number of nodes that it accepts."""
    max_nodes: int
    """Maximum number of nodes that it accepts."""
    nodes: int = 0
    """Nodes that it has now, 0 if it does not run."""
    sizes: tuple[int, ...] | None = None
    """Sizes that it accepts, None for all."""
    requested_sizes: tuple[int, ...] | None = None
    """The sizes to measure as the user listed them, None: the plan chooses."""
    curve: MeasuredCurve = field(default_factory=MeasuredCurve)
    """Its curve so far; the curve's phase is the job's current one."""
    pool: Hashable = "default"
    """Pool of the nodes on which it runs."""
    kind: str = ""
    """Jobs of the same kind in the same pool of nodes have the same curve; empty: no other job
    has.
    """


@dataclass(frozen=True)
class PriorReceived:
    """A prior from another job's curve, for a job that waits for its profile or is being
    profiled.
    """

    job: str
    """The job to which it applies."""
    prior: Prior
    """The other job's curve as a prior."""
    requested_sizes: tuple[int, ...] | None = None
    """The sizes to measure as the user listed them; None: sizes that ``prior`` determines well
    enough need no visit.
    """


@dataclass(frozen=True)
class NodesChanged:
    """The current nodes; replaces the report before. Send it after every change that the advisor
    did not ask for.
    """

    free: Mapping[Hashable, int]
    """Idle leased nodes by pool."""
    donors: tuple[Donor, ...] = ()
    """Running jobs that may give up nodes; none of them is being rescaled."""
    assigned: Mapping[str, int] = field(default_factory=dict)
    """Job -> nodes assigned to it, for jobs that wait or are being profiled; a rescale in progress
    counts as done. For absent jobs the number is unchanged.
    """


@dataclass(frozen=True)
class ScaleReached:
    """A rescale of the job is over: it processes samples, or is about to. The advisor ignores it
    at any size but the one that it asked for.
    """

    job: str
    """Its name."""
    nodes: int
    """Nodes on which it runs now."""


@dataclass(frozen=True)
class ProgressReported:
    """A job has reported progress."""

    job: str
    """Its name."""
    time: float
    """Time at which the last sample was processed, seconds on the clock of ``now``."""
    samples: float
    """Samples that the job has processed so far."""
    phase: str | None = None
    """The job's phase, None: unchanged."""


@dataclass(frozen=True)
class ScriptCrashed:
    """The job's script ended with an error, and no node was lost."""

    job: str
    """Its name."""
    nodes: int
    """Nodes on which it ran."""


@dataclass(frozen=True)
class JobEnded:
    """The job completed, failed or was cancelled."""

    job: str
    """Its name."""


@dataclass(frozen=True)
class AdvisorTick:
    """Time has passed. Send one about every second: the advisor checks its time limits here."""


AdvisorEvent = (
    ProfileRequested
    | PriorReceived
    | NodesChanged
    | ScaleReached
    | ProgressReported
    | ScriptCrashed
    | JobEnded
    | AdvisorTick
)

# --- answers ---


@dataclass(frozen=True)
class SetSize:
    """Move the job to ``nodes`` nodes. Taking nodes from a donor counts as an interruption of it
    (:attr:`jpa.donors.Donor.last_interrupted`). On the way down no nodes are taken.
    """

    job: str
    """Its name."""
    nodes: int
    """Its new size."""
    reason: str
    """A sentence for the user."""
    from_free: int = 0
    """Free nodes that join."""
    donor: str | None = None
    """The job that gives up nodes before, None for no job."""
    take: int = 0
    """Nodes that the donor gives up. Nodes beyond the need become free (the donor may accept only
    some sizes).
    """


@dataclass(frozen=True)
class PointMeasured:
    """One size of the job has been measured. Store the curve: a profile that a restart of the
    daemon interrupts continues from it.
    """

    job: str
    """Its name."""
    measurement: Measurement
    """The measurement."""
    curve: MeasuredCurve
    """The curve that includes it."""


class ProfileResult(str, Enum):
    """Outcome of a profile."""

    MEASURED = "measured"
    """Every size of the plan is known."""
    PARTIAL = "partial"
    """It ended early; the curve contains the measurements."""
    UNKNOWN = "unknown"
    """There is no measurement, because the job reported no progress or every size failed. It runs
    with a neutral prior.
    """
    GONE = "gone"
    """The job ended while it was profiled; the curve is of use to the next job of its kind."""


@dataclass(frozen=True)
class ProfileFinished:
    """The profile is over; from now on the allocator chooses the job's size."""

    job: str
    """Its name."""
    result: ProfileResult
    """Its outcome."""
    curve: MeasuredCurve
    """The job's curve."""
    reason: str
    """A sentence for the user."""
    nodes: int
    """Nodes of the job."""
    scale_ups: int = 0
    """Rescales to more nodes that the profile asked for, starts included."""
    scale_downs: int = 0
    """Rescales to fewer nodes that the profile asked for."""
    seconds: float = 0.0
    """Duration of all attempts, seconds."""
    visited: tuple[int, ...] = ()
    """Sizes visited, in order."""


@dataclass(frozen=True)
class ProfileWaiting:
    """The job's profile cannot start or continue yet. The advisor sends it once for each reason."""

    job: str
    """Its name."""
    reason: str
    """A sentence for the user."""


AdvisorAnswer = SetSize | PointMeasured | ProfileFinished | ProfileWaiting
