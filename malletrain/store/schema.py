"""Defines the tables of the database.

Decides the names and types of columns. Only :mod:`malletrain.store.migrations` creates the tables
(a test compares the two). :mod:`malletrain.store.records` has the rows as dataclasses, and the rest
of :mod:`malletrain.store` reads and writes them.

Times are seconds since the epoch, UTC; durations seconds; rates samples/s. Structured columns are
JSON as text, so that every database stores the same bytes.

:func:`shift_times` shifts stored times from which durations are computed, after a change of the
host's clock. Times that are only displayed (of events, measurements, a job's submission and end)
stay.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    text,
    update,
)

HEAD = "0009"
"""The newest schema version: the revision of the last file in ``migrations/versions``.
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
_EMPTY = text("''")
# SQLite numbers rows only in a column of type INTEGER.
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
    Column("account", _Name, nullable=False, server_default=_EMPTY),
    Column("values_until", Float(53)),
    Column("lasting_values", Text, nullable=False, server_default=text("'{}'")),
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
    Column("account", _Name, nullable=False, server_default=_EMPTY),
)

service = Table(
    "service",
    metadata,
    Column("party", _Name, primary_key=True),
    Column("served", Float(53), nullable=False),
    Column("due", Float(53), nullable=False),
    Column("seconds", Float(53), nullable=False),
    Column("updated", Float(53), nullable=False),
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
    Column("step_times", Text, nullable=False, server_default=text("'{}'")),
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

layout_searches = Table(
    "layout_searches",
    metadata,
    Column("job", _Id, ForeignKey("jobs.id"), primary_key=True),
    Column("node_class", _Name, nullable=False),
    Column("max_processes", Integer, nullable=False),
    Column("search", Text, nullable=False),
    Column("layout", Text, nullable=False),
    Column("facts", Text, nullable=False),
    Column("source", _Id, nullable=False),
)

layouts = Table(
    "layouts",
    metadata,
    Column("key", _Id, primary_key=True),
    Column("node_class", _Name, nullable=False),
    Column("cores", Integer, nullable=False),
    Column("layout", Text, nullable=False),
    Column("facts", Text, nullable=False),
    Column("job", _Id, nullable=False),
    Column("updated", Float(53), nullable=False),
)

service_starts = Table(
    "service_starts",
    metadata,
    Column("job", _Id, ForeignKey("jobs.id"), primary_key=True),
    Column("node_class", _Name, primary_key=True),
    Column("durations", Text, nullable=False),
)

goals = Table(
    "goals",
    metadata,
    Column("job", _Id, ForeignKey("jobs.id"), primary_key=True),
    Column("deadline", Float(53)),
    Column("budget_s", Float(53)),
    Column("work", Float(53)),
    Column("stated", Integer, nullable=False),
    Column("charged_s", Float(53), nullable=False),
    Column("charged_at", Float(53)),
    Column("standing", _Id, nullable=False),
)

node_history = Table(
    "node_history",
    metadata,
    Column("began", Float(53), primary_key=True),
    Column("node_class", _Name, primary_key=True),
    Column("nodes", Float(53), nullable=False),
)

tasks = Table(
    "tasks",
    metadata,
    Column("job", _Id, ForeignKey("jobs.id"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("arguments", Text, nullable=False),
    Column("state", _Id, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("node", _Name, nullable=False),
    Column("exit_code", BigInteger),
    Column("started", Float(53)),
    Column("ended", Float(53)),
    Column("tail", Text, nullable=False),
    Index(None, "job", "state", "number"),
)


_COUNTED_FROM = (
    (leases, leases.c.ended, ("requested", "started")),
    (jobs, jobs.c.ended, ("last_broke", "values_until")),
    (goals, None, ("charged_at",)),
    (service, None, ("updated",)),
)
"""Table, column that has a value if a row is no longer used (None if all are used), columns of the
times.
"""


def shift_times(connection: Connection, by_s: float) -> None:
    """Add ``by_s`` seconds to the times in use, in the transaction of ``connection``."""
    for table, ended_column, columns in _COUNTED_FROM:
        for name in columns:
            column = table.c[name]
            change = update(table).where(column.is_not(None)).values({name: column + by_s})
            connection.execute(
                change if ended_column is None else change.where(ended_column.is_(None))
            )
