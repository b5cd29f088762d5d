"""What the advisor is told and what it answers: the vocabulary between it and the controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from jpa.curve import MeasuredCurve
from jpa.donors import Donor
from jpa.measure import Measurement
from jpa.phase import Prior

# --- events ---


@dataclass(frozen=True)
class ProfileWanted:
    """A job's curve is to be measured. A job that is waiting or being profiled already is not
    queued twice.
    """

    job: str
    """Its name."""
    min_nodes: int
    """The fewest nodes it runs on."""
    max_nodes: int
    """The most nodes it runs on."""
    nodes: int = 0
    """Nodes held now, 0 when it does not run."""
    sizes: tuple[int, ...] | None = None
    """Sizes it accepts, None for all."""
    chosen: tuple[int, ...] | None = None
    """The user's own sizes to measure, None for the plan's."""
    curve: MeasuredCurve = field(default_factory=MeasuredCurve)
    """What is known so far; its phase is the job's current one."""
    node_class: str = "default"
    """Class of the nodes it runs on."""
    kind: str = ""
    """Jobs of one kind and class of nodes scale alike; empty: nobody else is of its kind."""


@dataclass(frozen=True)
class Suggested:
    """Another job's curve tells something of this one's, which waits for its profile or is being
    profiled.
    """

    job: str
    """The job that learns of it."""
    prior: Prior
    """What the other curve suggests."""
    chosen: tuple[int, ...] | None = None
    """The user's own sizes to measure; None: what ``prior`` tells need not be visited."""


@dataclass(frozen=True)
class NodesChanged:
    """The nodes as they are now; replaces what was said before. Send it after every change that is
    not the advisor's own.
    """

    free: Mapping[str, int]
    """Idle leased nodes by class."""
    donors: tuple[Donor, ...] = ()
    """Running jobs that may be asked for nodes; none that is being rescaled."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Nodes assigned to jobs that wait or are being profiled; a rescale under way counts as done.
    A job not named holds what it held.
    """


@dataclass(frozen=True)
class Scaled:
    """A rescale of the job is over: it processes samples, or is about to. Of use only at the size
    asked for.
    """

    job: str
    """Its name."""
    nodes: int
    """Nodes it is on now."""


@dataclass(frozen=True)
class ProgressSeen:
    """A job has reported progress."""

    job: str
    """Its name."""
    time: float
    """When the last sample was processed, seconds on the clock of ``now``."""
    samples: float
    """Processed by the job so far."""
    phase: str | None = None
    """The phase it is in, None for unchanged."""


@dataclass(frozen=True)
class Crashed:
    """The job's script ended with an error on ``nodes`` nodes (no node was lost)."""

    job: str
    nodes: int


@dataclass(frozen=True)
class JobGone:
    """The job completed, failed or was cancelled."""

    job: str


@dataclass(frozen=True)
class AdvisorTick:
    """Time passed. Send one every second or so: limits of time are noticed here."""


AdvisorEvent = (
    ProfileWanted
    | Suggested
    | NodesChanged
    | Scaled
    | ProgressSeen
    | Crashed
    | JobGone
    | AdvisorTick
)

# --- answers ---


@dataclass(frozen=True)
class SetSize:
    """Move the job to ``nodes`` nodes. To take nodes from a donor is an interruption: record it. On
    the way down nothing is taken.
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
    """The job that gives up nodes first, None when nobody does."""
    take: int = 0
    """Nodes that the donor gives up. What is above the need (its allowed sizes) becomes free."""


@dataclass(frozen=True)
class PointMeasured:
    """One size of the job is measured. Store the curve: a profile interrupted by a restart goes on
    from there.
    """

    job: str
    """Its name."""
    measurement: Measurement
    """What was seen."""
    curve: MeasuredCurve
    """The curve with it."""


class ProfileResult(str, Enum):
    """How a profile ended."""

    MEASURED = "measured"
    """Every size wanted is known."""
    PARTIAL = "partial"
    """It had to end early; what was measured is in the curve."""
    UNKNOWN = "unknown"
    """The job reported no progress: nothing was learnt, it runs with a neutral prior."""
    GONE = "gone"
    """The job ended while it was profiled; the curve is worth keeping for the next of its kind."""


@dataclass(frozen=True)
class ProfileFinished:
    """The profile is over; the job belongs to the allocator again."""

    job: str
    """Its name."""
    result: ProfileResult
    """How it ended."""
    curve: MeasuredCurve
    """What is known now."""
    reason: str
    """A sentence for the user."""
    nodes: int
    """Where the job stands."""
    scale_ups: int = 0
    """Rescales to more nodes that the profile asked for; a start is one."""
    scale_downs: int = 0
    """Rescales to fewer nodes that it asked for."""
    seconds: float = 0.0
    """From the first of them to the end."""
    visited: tuple[int, ...] = ()
    """Sizes visited, in order."""


@dataclass(frozen=True)
class Waiting:
    """The job's profile cannot start, or go on, yet. Said once per reason."""

    job: str
    reason: str


AdvisorAnswer = SetSize | PointMeasured | ProfileFinished | Waiting
