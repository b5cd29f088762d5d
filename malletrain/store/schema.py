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

HEAD = "0001"
"""The newest schema version this code knows: the revision of the last file in
``migrations/versions``.
"""

NODE_JOINED = "node-joined"
NODE_LOST = "node-lost"
"""Kinds of events that make up the trace of the nodes held."""

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
    Column("node_seconds", Float(53), nullable=False),
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

observation_history = Table(
    "observation_history",
    metadata,
    Column("seq", _Serial, primary_key=True, autoincrement=True),
    Column("job", _Id, ForeignKey("jobs.id"), nullable=False),
    Column("nodes", Integer, nullable=False),
    Column("batch", Float(53), nullable=False),
    Column("rate", Float(53), nullable=False),
    Column("spread", Float(53), nullable=False),
    Column("seconds", Float(53), nullable=False),
    Column("samples", Float(53), nullable=False),
    Column("time", Float(53), nullable=False),
    Index(None, "job", "seq"),
    sqlite_autoincrement=True,
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
    """One malleable job. ``spec`` is the JSON text of the job as submitted; it is kept as it came.

    ``generation``: number of its last round, ``members``: the nodes in it; ``planned_nodes``: the
    nodes the last plan gave it; ``metrics``: last value of each number the script reported;
    ``notices``: sentences for its owner, oldest first; ``snapshot``: where its state is saved and
    up to which sample; ``failure``: the last lines of the rank that failed; ``node_seconds``: time
    held, summed over nodes.
    """

    id: str
    name: str
    owner: str
    spec: str
    state: str
    reason: str = ""
    submitted: float = 0.0
    started: float | None = None
    ended: float | None = None
    generation: int = 0
    planned_nodes: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    tries: int = 0
    last_broke: float | None = None
    samples: float = 0.0
    samples_before: float = 0.0
    node_seconds: float = 0.0
    last_progress: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    snapshot: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class LeaseRow:
    """One hold on one node. ``state``: ``requested`` | ``pending`` | ``running`` | ``leaving`` |
    ``ended``; all but the last are active.

    ``public_key``: z85 text of the CURVE key its agent proves itself with.
    """

    id: str
    node: str
    state: str
    scheduler_id: str = ""
    public_key: str = ""
    node_class: str = "default"
    owner: str = ""
    requested: float = 0.0
    started: float | None = None
    ended: float | None = None
    end_reason: str = ""


@dataclass(frozen=True)
class EventRow:
    """One line of the audit trail. ``seq`` is given by the database (0: not stored yet), grows and
    is never used twice.
    """

    time: float
    kind: str
    job: str = ""
    node: str = ""
    lease: str = ""
    generation: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    seq: int = 0


@dataclass(frozen=True)
class ObservationRow:
    """Throughput of ``job`` observed at a scale of ``nodes``.

    ``batch``: global batch size in samples; ``rate`` ± ``spread`` (half width) samples/s, from
    ``samples`` in ``seconds``.
    """

    job: str
    nodes: int
    batch: float
    rate: float
    spread: float
    seconds: float
    samples: float
    time: float


@dataclass(frozen=True)
class RescaleRow:
    """One change of scale. ``kind``: ``start`` | ``up`` | ``down`` | ``loss`` | ``same``.

    ``cost_s``: last sample before → first sample after, ``None`` until that is known; ``phases``:
    its parts in seconds by name.
    """

    job: str
    generation: int
    kind: str
    from_nodes: int
    to_nodes: int
    began: float
    ended: float | None = None
    cost_s: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ProfileRow:
    """What is known of one job's scaling. ``key``: its profile key; ``learned``: see
    :class:`malletrain.core.scaling_model.ScalingModel`, empty at first.

    ``waits``: why its profile does not begin; ``interruptions``: when it gave nodes to a profile,
    each ``{"time", "by", "before", "nodes"}``; ``parameters``, ``flops`` (a sample, forward and
    backward): what its script says of its model.
    """

    job: str
    key: str = ""
    node_class: str = "default"
    learned: Mapping[str, Any] = field(default_factory=dict)
    waits: str = ""
    interruptions: tuple[Mapping[str, Any], ...] = ()
    parameters: float | None = None
    flops: float | None = None


@dataclass(frozen=True)
class CurveRow:
    """The newest curve of a kind of job, kept for the next of its kind. ``processes``: on each
    node; ``job``: which one it is from.
    """

    key: str
    node_class: str
    processes: int
    learned: Mapping[str, Any]
    job: str
    updated: float
    parameters: float | None = None
    flops: float | None = None
