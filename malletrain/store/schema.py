"""What the daemon remembers: tables, and the rows of them as frozen dataclasses.

Decides the names and types of what is stored. How the tables come into being is told by
:mod:`malletrain.store.migrations` alone (a test holds the two against each other); how they are
read and written is :mod:`malletrain.store`'s.

Times are seconds since the epoch, UTC; durations seconds; rates samples/s. Structured columns are
JSON as text, so that every database stores the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

HEAD = "0003_metrics"
"""The newest schema version this code knows: the revision of the last file in
``migrations/versions``.
"""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    }
)

_Name = String(255)
_Id = String(64)
# SQLite numbers rows by itself in a column of type INTEGER only.
_Serial = BigInteger().with_variant(Integer, "sqlite")

meta = Table(
    "meta", metadata, Column("key", _Id, primary_key=True), Column("value", Text, nullable=False)
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("number", BigInteger, nullable=False, unique=True),
    Column("name", _Name, nullable=False, index=True),
    Column("owner", _Name, nullable=False),
    Column("spec", Text, nullable=False),
    Column("state", _Id, nullable=False, index=True),
    Column("reason", Text, nullable=False),
    Column("submitted", Float(53), nullable=False),
    Column("started", Float(53)),
    Column("ended", Float(53)),
    Column("generation", BigInteger, nullable=False),
    Column("planned_nodes", Text, nullable=False),
    Column("members", Text, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("last_broke", Float(53)),
    Column("samples", Float(53), nullable=False),
    Column("samples_before", Float(53), nullable=False),
    Column("last_progress", Float(53)),
    Column("metrics", Text, nullable=False),
    Column("notices", Text, nullable=False),
    Column("snapshot", Text, nullable=False),
    Column("failure", Text, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("number", BigInteger, nullable=False, unique=True),
    Column("node", _Name, nullable=False),
    Column("scheduler_id", _Name, nullable=False),
    Column("state", _Id, nullable=False, index=True),
    Column("public_key", _Id, nullable=False),
    Column("node_class", _Name, nullable=False),
    Column("owner", _Name, nullable=False),
    Column("requested", Float(53), nullable=False),
    Column("started", Float(53)),
    Column("ended", Float(53)),
    Column("end_reason", Text, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("seq", _Serial, primary_key=True, autoincrement=True),
    Column("time", Float(53), nullable=False),
    Column("kind", _Id, nullable=False),
    Column("job", _Id, nullable=False),
    Column("node", _Name, nullable=False),
    Column("lease", _Id, nullable=False),
    Column("generation", BigInteger),
    Column("data", Text, nullable=False),
    Index(None, "job", "seq"),
    Index(None, "kind", "seq"),
    sqlite_autoincrement=True,
)

observations = Table(
    "observations",
    metadata,
    Column("job", _Id, ForeignKey("jobs.id"), primary_key=True),
    Column("nodes", Integer, primary_key=True, autoincrement=False),
    Column("batch", Float(53), nullable=False),
    Column("rate", Float(53), nullable=False),
    Column("spread", Float(53), nullable=False),
    Column("seconds", Float(53), nullable=False),
    Column("samples", Float(53), nullable=False),
    Column("time", Float(53), nullable=False),
)

rescales = Table(
    "rescales",
    metadata,
    Column("job", _Id, ForeignKey("jobs.id"), primary_key=True),
    Column("generation", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", _Id, nullable=False),
    Column("from_nodes", Integer, nullable=False),
    Column("to_nodes", Integer, nullable=False),
    Column("began", Float(53), nullable=False),
    Column("ended", Float(53)),
    Column("cost_s", Float(53)),
    Column("phases", Text, nullable=False),
)

profiles = Table(
    "profiles",
    metadata,
    Column("job", _Id, ForeignKey("jobs.id"), primary_key=True),
    Column("key", _Id, nullable=False),
    Column("node_class", _Name, nullable=False),
    Column("learned", Text, nullable=False),
    Column("waits", Text, nullable=False),
    Column("interruptions", Text, nullable=False),
    Column("parameters", Float(53)),
    Column("flops", Float(53)),
)

metric_points = Table(
    "metric_points",
    metadata,
    Column("job", _Id, ForeignKey("jobs.id"), primary_key=True),
    Column("name", _Name, primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("time", Float(53), nullable=False),
    Column("value", Float(53), nullable=False),
    Column("step", BigInteger),
    Column("samples", Float(53), nullable=False),
    Column("nodes", Integer, nullable=False),
)

curves = Table(
    "curves",
    metadata,
    Column("key", _Id, primary_key=True),
    Column("node_class", _Name, nullable=False),
    Column("processes", Integer, nullable=False),
    Column("learned", Text, nullable=False),
    Column("parameters", Float(53)),
    Column("flops", Float(53)),
    Column("job", _Id, nullable=False),
    Column("updated", Float(53), nullable=False, index=True),
)


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
