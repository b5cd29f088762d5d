"""The commands that the controller returns and a shell carries out.

Its input is in :mod:`malletrain.core.events`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from malletrain.core.events import JobState
from malletrain.core.scaling_model import ScalingModel
from malletrain.protocol.event_kinds import EventKind

# --- commands ---


@dataclass(frozen=True)
class TakeLeases:
    """Request a lease on each of these nodes from the main scheduler, as ``owner``."""

    nodes: tuple[str, ...]
    owner: str = ""


@dataclass(frozen=True)
class ReleaseLeases:
    """End the leases of these nodes, on which nothing runs."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class ReclaimNodes:
    """End the leases of these nodes once their jobs have left them, at most ``within_s`` seconds
    from now. Another owner's jobs have more use for the nodes.
    """

    nodes: tuple[str, ...]
    within_s: float


@dataclass(frozen=True)
class Start:
    """Start the job, which has no nodes, on these nodes."""

    job: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Rescale:
    """Move the running job to exactly these nodes. If they are its current nodes, restart its
    workers.
    """

    job: str
    nodes: tuple[str, ...]
    within_s: float | None = None
    """Seconds until the first node of the old set is gone; None for no time limit."""
    new_layout: bool = False
    """Whether the workers are restarted on the same nodes, which are used in another layout."""


@dataclass(frozen=True)
class Suspend:
    """Take all nodes from the job; it keeps its place."""

    job: str
    within_s: float | None = None
    """Seconds until the first of its nodes is gone; None for no time limit."""


@dataclass(frozen=True)
class Stop:
    """The job has ended in ``state``; free its nodes."""

    job: str
    state: JobState
    reason: str = ""
    """Reason as a sentence; empty if there is none."""


@dataclass(frozen=True)
class Announce:
    """An event for the audit log and its readers."""

    job: str
    kind: EventKind
    sentence: str
    """The event as a sentence for users."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The event's values for programs."""


@dataclass(frozen=True)
class LossExpected:
    """The job is expected to lose a node after ``in_s`` seconds on average, so that it can adapt
    how often it saves. Sent when this has changed.
    """

    job: str
    in_s: float


@dataclass(frozen=True)
class BatchAdvised:
    """The global batch, in samples, suits the job's nodes. Sent when it has changed, and after each
    change of nodes.
    """

    job: str
    size: int


@dataclass(frozen=True)
class KeepScalingModel:
    """Store the job's scaling model."""

    job: str
    scaling: ScalingModel


Command = (
    TakeLeases
    | ReleaseLeases
    | ReclaimNodes
    | Start
    | Rescale
    | Suspend
    | Stop
    | Announce
    | KeepScalingModel
    | LossExpected
    | BatchAdvised
)
