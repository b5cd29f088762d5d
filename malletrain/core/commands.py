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
    """Ask the main scheduler for a lease on each of these nodes, as ``owner``."""

    nodes: tuple[str, ...]
    owner: str = ""


@dataclass(frozen=True)
class ReleaseLeases:
    """End the leases of these nodes; nothing runs on them."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class ReclaimNodes:
    """Another owner's jobs have more use for these nodes: end their leases once their jobs have
    moved off, in ``within_s`` seconds.
    """

    nodes: tuple[str, ...]
    within_s: float


@dataclass(frozen=True)
class Start:
    """Run the job, which has no nodes, on these."""

    job: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Rescale:
    """Move the running job to exactly these nodes (the same ones again: restart its workers)."""

    job: str
    nodes: tuple[str, ...]
    within_s: float | None = None
    """A node of the old set is gone after this many seconds; None: take the time it needs."""


@dataclass(frozen=True)
class Suspend:
    """Take all nodes from the job; it keeps its place."""

    job: str
    within_s: float | None = None


@dataclass(frozen=True)
class Stop:
    """The job has ended in ``state``; free its nodes."""

    job: str
    state: JobState
    reason: str = ""


@dataclass(frozen=True)
class Announce:
    """Something for the audit log, and for whoever follows it."""

    job: str
    kind: EventKind
    sentence: str
    """For people."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """For programs."""


@dataclass(frozen=True)
class LossExpected:
    """On average the job is expected to lose a node after ``in_s`` seconds: it may save the more
    often. Said when it has changed.
    """

    job: str
    in_s: float


@dataclass(frozen=True)
class KeepScalingModel:
    """Store what is now known of the job's scaling."""

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
)
