"""The rows of the database as the daemon has them in hand: one class a table.

How they are written and read is :mod:`malletrain.store.rows`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from malletrain.protocol.boot import boot_name


@dataclass(frozen=True)
class JobRow:
    """One malleable job."""

    id: str
    name: str
    owner: str
    spec: str
    """JSON text of the job as submitted, kept as it came."""
    state: str
    """A :class:`malletrain.core.events.JobState`."""
    reason: str = ""
    """Why it is in this state, as a sentence."""
    submitted: float = 0.0
    started: float | None = None
    ended: float | None = None
    generation: int = 0
    """Number of its last round."""
    planned_nodes: tuple[str, ...] = ()
    """The nodes that the last plan gave it."""
    members: tuple[str, ...] = ()
    """The nodes in its last round."""
    tries: int = 0
    """Starts that ended in a failure of its workers, as far as they still count."""
    last_broke: float | None = None
    """When the last of them did."""
    samples: float = 0.0
    """Processed so far, over all its restarts."""
    samples_before: float = 0.0
    """Of these, those before its last round."""
    last_progress: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Last value of each number that the script reported."""
    notices: tuple[str, ...] = ()
    """Sentences for its owner, oldest first."""
    snapshot: Mapping[str, Any] = field(default_factory=dict)
    """Where its state is saved, and up to which sample."""
    failure: str = ""
    """The last lines of the rank that failed."""
    account: str = ""
    """In which its owner was when it was submitted."""


@dataclass(frozen=True)
class LeaseRow:
    """One hold on one node."""

    id: str
    node: str
    state: str
    """A :class:`malletrain.protocol.event_kinds.LeaseStatus`."""
    scheduler_id: str = ""
    """What the main scheduler calls the one-node job."""
    public_key: str = ""
    """z85 text of the CURVE key that its agent proves itself with."""
    node_class: str = "default"
    owner: str = ""
    """As whom it was submitted; empty: as the daemon's own user."""
    requested: float = 0.0
    started: float | None = None
    ended: float | None = None
    end_reason: str = ""
    account: str = ""
    """In which its owner was when it was asked for."""


@dataclass(frozen=True)
class ServiceRow:
    """What a party was served of its share (:class:`malletrain.core.shares.PartyService`)."""

    party: str
    served: float
    due: float
    seconds: float
    updated: float
    """When this was written."""


@dataclass(frozen=True)
class EventRow:
    """One line of the audit log."""

    time: float
    kind: str
    """An :class:`malletrain.protocol.event_kinds.EventKind`."""
    job: str = ""
    node: str = ""
    lease: str = ""
    generation: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    seq: int = 0
    """Given by the database (0: not stored yet); it grows and is never used twice."""


@dataclass(frozen=True)
class ObservationRow:
    """Throughput of a job, observed at one scale."""

    job: str
    nodes: int
    batch: float
    """Global batch size, samples."""
    rate: float
    """Samples/s."""
    spread: float
    """Half width of the interval around ``rate``, samples/s."""
    seconds: float
    samples: float
    """Processed in ``seconds``."""
    time: float


STARTED = "start"
"""The kind of a change from no node at all: a start, which people do not count as a rescale."""


@dataclass(frozen=True)
class RescaleRow:
    """One change of scale."""

    job: str
    generation: int
    kind: str
    """``start``, ``up``, ``down``, ``loss`` or ``same``."""
    from_nodes: int
    to_nodes: int
    began: float
    ended: float | None = None
    cost_s: float | None = None
    """Last sample before to first sample after, seconds; None until that is known."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Its parts in seconds, by name."""


@dataclass(frozen=True)
class ProfileRow:
    """What is known of one job's scaling."""

    job: str
    key: str = ""
    """Its profile key: jobs with the same key scale alike."""
    node_class: str = "default"
    learned: Mapping[str, Any] = field(default_factory=dict)
    """A :class:`malletrain.core.scaling_model.ScalingModel` as a mapping, empty at first."""
    waits: str = ""
    """Why its profile does not begin."""
    interruptions: tuple[Mapping[str, Any], ...] = ()
    """When it gave nodes to a profile, each ``{"time", "by", "before", "nodes"}``."""
    parameters: float | None = None
    """Of its model, as its script says."""
    flops: float | None = None
    """Of a sample, forward and backward, as its script says."""


@dataclass(frozen=True)
class MetricRow:
    """One value of a metric of a job, kept of those that its script reported."""

    job: str
    name: str
    number: int
    """How many were reported before it."""
    time: float
    value: float
    step: int | None
    """The script's own count."""
    samples: float
    """Processed by the job by then."""
    nodes: int
    """The job's scale then."""


@dataclass(frozen=True)
class CurveRow:
    """The newest curve of a kind of job, kept for the next of its kind."""

    key: str
    node_class: str
    processes: int
    """On each node."""
    learned: Mapping[str, Any]
    job: str
    """Which one it is from."""
    updated: float
    parameters: float | None = None
    flops: float | None = None


@dataclass(frozen=True)
class GoalRow:
    """What the owner of a job wants beyond speed, and how it stands with that."""

    job: str
    deadline: float | None = None
    budget_s: float | None = None
    """Charged node-seconds."""
    work: float | None = None
    """Samples in all, in the count of the job's own row."""
    stated: int = 0
    """1: its owner said how much work there is; 0: its sampler did, or nobody."""
    charged_s: float = 0.0
    """Node-seconds that it was charged, up to ``charged_at``."""
    charged_at: float | None = None
    standing: str = ""
    """A :class:`malletrain.core.goals.GoalStanding`; empty: not known yet."""


@dataclass(frozen=True)
class NodeSpanRow:
    """How many nodes of a class there were for jobs over one span, on average."""

    began: float
    node_class: str
    nodes: float


@dataclass(frozen=True)
class Boot:
    """This start of the daemon: ``daemon_id`` is the database's own name, ``number`` counts its
    starts from 1.
    """

    daemon_id: str
    number: int

    def __str__(self) -> str:
        return boot_name(self.daemon_id, self.number)


@dataclass(frozen=True)
class Totals:
    """Counts and sums over everything stored."""

    jobs: Mapping[str, int]
    """State → jobs."""
    rescales: Mapping[str, int]
    """Kind → rescales."""
    events: Mapping[str, int]
    """Kind → events."""
    samples: float
    """Processed by all jobs."""
