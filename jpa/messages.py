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

    ``nodes``: held now (0: not running). ``sizes``: allowed sizes, None for all. ``chosen``: the
    user's ladder, None for the plan's own. ``curve``: what is known so far, its phase being the
    job's current one. ``kind``: jobs of one kind and class of nodes scale alike (empty: nobody else
    is of its kind).
    """

    job: str
    min_nodes: int
    max_nodes: int
    nodes: int = 0
    sizes: tuple[int, ...] | None = None
    chosen: tuple[int, ...] | None = None
    curve: MeasuredCurve = field(default_factory=MeasuredCurve)
    node_class: str = "default"
    kind: str = ""


@dataclass(frozen=True)
class Suggested:
    """Another job's curve tells something of this one's, which waits for its profile or is being
    profiled. ``chosen``: the user's ladder; None: what ``prior`` tells need not be visited.
    """

    job: str
    prior: Prior
    chosen: tuple[int, ...] | None = None


@dataclass(frozen=True)
class NodesChanged:
    """The nodes as they are now; replaces what was said before. Send it after every change that is
    not the advisor's own.

    ``free``: idle leased nodes by class. ``donors``: running jobs that may be asked for nodes (none
    that is being rescaled). ``held``: nodes assigned to jobs that wait or are being profiled (a
    rescale under way counts as done); a job not named holds what it held.
    """

    free: Mapping[str, int]
    donors: tuple[Donor, ...] = ()
    held: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Scaled:
    """A rescale of the job is over: it processes samples, or is about to, on ``nodes`` nodes. Of
    use only at the size asked for.
    """

    job: str
    nodes: int


@dataclass(frozen=True)
class ProgressSeen:
    """``samples`` processed by the job so far; ``time`` of the last of them, on the clock of
    ``now``. ``phase``: None for unchanged.
    """

    job: str
    time: float
    samples: float
    phase: str | None = None


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
    """Move the job to ``nodes`` nodes: ``from_free`` free ones join, and ``take`` that the job
    ``donor`` gives up first.

    With ``take`` above what is needed (the donor's allowed sizes) the rest becomes free. All three
    are 0 or None on the way down. ``take`` from a ``donor`` is an interruption: record it.
    """

    job: str
    nodes: int
    reason: str
    from_free: int = 0
    donor: str | None = None
    take: int = 0


@dataclass(frozen=True)
class PointMeasured:
    """One size of the job is measured; ``curve`` holds it. Store it: a profile interrupted by a
    restart goes on from there.
    """

    job: str
    measurement: Measurement
    curve: MeasuredCurve


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
    """The profile is over; the job stands at ``nodes`` nodes and belongs to the allocator again.

    ``scale_ups``, ``scale_downs``: rescales the profile asked for (a start counts as scaling up).
    ``seconds``: from the first of them.
    """

    job: str
    result: ProfileResult
    curve: MeasuredCurve
    reason: str
    nodes: int
    scale_ups: int = 0
    scale_downs: int = 0
    seconds: float = 0.0
    visited: tuple[int, ...] = ()


@dataclass(frozen=True)
class Waiting:
    """The job's profile cannot start, or go on, yet. Said once per reason."""

    job: str
    reason: str


AdvisorAnswer = SetSize | PointMeasured | ProfileFinished | Waiting
