"""The daemon's memory: jobs, leases, the audit trail and what was measured, in a database.

Decides how rows are read and written, that each call is one short transaction (or part of the one
opened with :meth:`Store.transaction`), and that a database of an earlier version is migrated and
one of a later version refused. It does not decide what is remembered
(:mod:`malletrain.store.schema`) nor when.

A call that returned is on disk: ``kill -9`` loses nothing of it. All calls are synchronous and come
from one thread, the daemon's loop. SQLite (write-ahead log) by default, anything SQLAlchemy speaks
by URL.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, TextIO

from sqlalchemy import Connection, Engine, Select, Table, delete, func, insert, or_, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from malletrain.store import migrations, schema
from malletrain.store.database import StoreError, open_engine, schema_version
from malletrain.store.rows import Row, decode, encode, encode_values
from malletrain.store.schema import (
    HEAD,
    CurveRow,
    EventRow,
    JobRow,
    LeaseRow,
    ObservationRow,
    ProfileRow,
    RescaleRow,
)

__all__ = [
    "Boot",
    "CurveRow",
    "EventRow",
    "JobRow",
    "LeaseRow",
    "ObservationRow",
    "ProfileRow",
    "RescaleRow",
    "Store",
    "StoreError",
    "Totals",
]

HISTORY_PER_JOB = 500
"""Observations of one job that are kept besides the newest of each scale."""

_ENDED = "ended"


@dataclass(frozen=True)
class Boot:
    """This start of the daemon: ``daemon_id`` is the database's own name, ``number`` counts its
    starts from 1.
    """

    daemon_id: str
    number: int

    def __str__(self) -> str:
        return f"{self.daemon_id[:8]}-{self.number}"


@dataclass(frozen=True)
class Totals:
    """Sums over all jobs: ``jobs`` by state, ``rescales`` by kind, ``events`` by kind; node_seconds
    in s.
    """

    jobs: Mapping[str, int]
    rescales: Mapping[str, int]
    events: Mapping[str, int]
    samples: float
    node_seconds: float


class Store:
    """An open database. Make one with :meth:`open`; :meth:`close` it, or use it as a context
    manager.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None

    @classmethod
    def open(cls, url: str) -> Store:
        """Open the database at the SQLAlchemy URL ``url``, create it or migrate it to this version.

        Raises:
            StoreError: it cannot be opened, or a later version of MalleTrain wrote it.
        """
        store = cls(open_engine(url))
        try:
            store._migrate()
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Close the database. Nothing is lost by not calling it."""
        self._engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The database's URL without its password."""
        return self._engine.url.render_as_string(hide_password=True)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Everything called inside is committed together, or not at all when an exception leaves
        the block. Blocks may nest.
        """
        if self._connection is not None:
            yield self._connection
            return
        try:
            with self._engine.begin() as connection:
                self._connection = connection
                try:
                    yield connection
                finally:
                    self._connection = None
        except (DBAPIError, PoolTimeout) as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            said = str(cause).strip().partition("\n")[0].rstrip(".")
            raise StoreError(
                f"The database {self.url} refused: {said}. Nothing of this step was saved."
            ) from error

    def _migrate(self) -> None:
        with self.transaction() as connection:
            current = schema_version(connection)
            if current == HEAD:
                return
            if current is not None and current not in migrations.versions():
                raise StoreError(
                    f"The database {self.url} has schema version {current}; this malletrain "
                    f"knows versions up to {HEAD}. It was written "
                    "by a later malletrain: run that version, or name another database in "
                    "[daemon] database."
                )
            migrations.upgrade(connection)

    # --- the daemon itself ---

    def boot(self) -> Boot:
        """Count one start of the daemon."""
        with self.transaction() as connection:
            daemon_id = _get_meta(connection, "daemon_id") or uuid.uuid4().hex
            _set_meta(connection, "daemon_id", daemon_id)
            return Boot(daemon_id, _next(connection, "boots"))

    # --- jobs ---

    def new_job_id(self) -> str:
        """The next job id: ``j1``, ``j2``, … Never given twice."""
        with self.transaction() as connection:
            return f"j{_next(connection, 'last_job')}"

    def add_job(self, job: JobRow) -> JobRow:
        """Store a new job. Raises StoreError when its id is taken."""
        with self.transaction() as connection:
            connection.execute(
                insert(schema.jobs).values({**encode(job), "number": _number(job.id)})
            )
            return job

    def update_job(self, job_id: str, **changes: Any) -> JobRow:
        """Set fields of a job and return it. Raises StoreError for an unknown job, TypeError for an
        unknown field.
        """
        return self._update(schema.jobs, JobRow, job_id, changes)

    def get_job(self, job_id: str) -> JobRow | None:
        """The job with exactly this id."""
        return self._one(select(schema.jobs).where(schema.jobs.c.id == job_id), JobRow)

    def list_jobs(
        self,
        states: Iterable[str] | None = None,
        owner: str | None = None,
        newest: int | None = None,
    ) -> list[JobRow]:
        """Jobs in order of submission, of these states and this owner if given; only so many of the
        ``newest`` if given.
        """
        number = schema.jobs.c.number
        query = (
            select(schema.jobs).order_by(number if newest is None else number.desc()).limit(newest)
        )
        if states is not None:
            query = query.where(schema.jobs.c.state.in_(list(states)))
        if owner is not None:
            query = query.where(schema.jobs.c.owner == owner)
        return self._all(query, JobRow)[:: 1 if newest is None else -1]

    def find_jobs(self, text: str) -> list[JobRow]:
        """The jobs that ``text`` may mean: the one with that id; else those of that name; else
        those whose id or name begin so.

        In order of submission. More than one means that the text is ambiguous, none that there is
        no such job.
        """
        table = schema.jobs
        for condition in (
            table.c.id == text,
            table.c.name == text,
            or_(
                table.c.id.startswith(text, autoescape=True),
                table.c.name.startswith(text, autoescape=True),
            ),
        ):
            if text and (
                found := self._all(select(table).where(condition).order_by(table.c.number), JobRow)
            ):
                return found
        return []

    # --- leases ---

    def new_lease_id(self) -> str:
        """The next lease id: ``l1``, ``l2``, … Never given twice."""
        with self.transaction() as connection:
            return f"l{_next(connection, 'last_lease')}"

    def put_lease(self, lease: LeaseRow) -> LeaseRow:
        """Store a lease as it is now, new or not."""
        with self.transaction() as connection:
            _put(
                connection,
                schema.leases,
                {"id": lease.id},
                {**encode(lease), "number": _number(lease.id)},
            )
            return lease

    def update_lease(self, lease_id: str, **changes: Any) -> LeaseRow:
        """Set fields of a lease and return it. Raises StoreError for an unknown lease, TypeError
        for an unknown field.
        """
        return self._update(schema.leases, LeaseRow, lease_id, changes)

    def get_lease(self, lease_id: str) -> LeaseRow | None:
        """The lease with exactly this id."""
        return self._one(select(schema.leases).where(schema.leases.c.id == lease_id), LeaseRow)

    def active_leases(self) -> list[LeaseRow]:
        """Leases that have not ended, oldest first."""
        table = schema.leases
        return self._all(
            select(table).where(table.c.state != _ENDED).order_by(table.c.number), LeaseRow
        )

    def list_leases(self) -> list[LeaseRow]:
        """All leases, oldest first."""
        return self._all(select(schema.leases).order_by(schema.leases.c.number), LeaseRow)

    # --- the audit trail ---

    def add_event(self, row: EventRow) -> EventRow:
        """Append an event; returns it with its number."""
        return self.add_events([row])[0]

    def add_events(self, rows: Iterable[EventRow]) -> list[EventRow]:
        """Append events in order, all or none; returns them with their numbers."""
        with self.transaction() as connection:
            stored = []
            for row in rows:
                values = encode(row)
                del values["seq"]
                result = connection.execute(insert(schema.events).values(values))
                (seq,) = result.inserted_primary_key or (0,)
                stored.append(replace(row, seq=seq))
            return stored

    def events_since(
        self, seq: int = 0, limit: int = 1000, job: str | None = None, node: str | None = None
    ) -> list[EventRow]:
        """At most ``limit`` events after number ``seq``, oldest first, of this job or node if
        given.
        """
        query = _of(select(schema.events).where(schema.events.c.seq > seq), job, node)
        return self._all(query.order_by(schema.events.c.seq).limit(limit), EventRow)

    def last_events(
        self, limit: int = 100, job: str | None = None, node: str | None = None
    ) -> list[EventRow]:
        """The newest ``limit`` events, oldest of them first."""
        query = _of(select(schema.events), job, node)
        return self._all(query.order_by(schema.events.c.seq.desc()).limit(limit), EventRow)[::-1]

    def export_trace(self, file: TextIO) -> int:
        """Write when which node was held, as a trace (``time_s,node,event``) that a replay can use;
        returns the number of rows.

        Time 0 is the first event. A node that joins twice in a row (it was adopted after a restart)
        is written once, and a clock that was set back makes no event earlier than the one before.
        """
        table = schema.events
        query = (
            select(table.c.time, table.c.node, table.c.kind)
            .where(table.c.kind.in_((schema.NODE_JOINED, schema.NODE_LOST)), table.c.node != "")
            .order_by(table.c.seq)
        )
        held: set[str] = set()
        last: dict[str, float] = {}
        begin: float | None = None
        now, rows = 0.0, 0
        file.write("time_s,node,event\n")
        with self.transaction() as connection:
            for time, node, kind in connection.execution_options(yield_per=1000).execute(query):
                joined = kind == schema.NODE_JOINED
                if joined == (node in held):
                    continue
                begin = time if begin is None else begin
                # To the millisecond, and no node twice at one instant: a trace says which of two
                # changes came first by their times.
                now = last[node] = round(max(now, time - begin, last.get(node, -1.0) + 0.001), 3)
                (held.add if joined else held.discard)(node)
                file.write(f"{now:.3f},{node},{'idle' if joined else 'busy'}\n")
                rows += 1
        return rows

    # --- what was measured ---

    def put_observation(self, row: ObservationRow) -> None:
        """Keep ``row`` as what is known of the job at that scale now, and add it to the job's
        history (the newest of it are kept).
        """
        history = schema.observation_history
        with self.transaction() as connection:
            values = encode(row)
            _put(connection, schema.observations, {"job": row.job, "nodes": row.nodes}, values)
            connection.execute(insert(history).values(values))
            oldest = (
                select(history.c.seq)
                .where(history.c.job == row.job)
                .order_by(history.c.seq.desc())
                .offset(HISTORY_PER_JOB)
            )
            # MySQL deletes from no table that it reads, hence two statements.
            if (last := connection.execute(oldest.limit(1)).scalar()) is not None:
                connection.execute(
                    delete(history).where(history.c.job == row.job, history.c.seq <= last)
                )

    def observations(self, job_id: str) -> list[ObservationRow]:
        """What is known of the job's throughput, one row a scale, smallest first."""
        table = schema.observations
        return self._all(
            select(table).where(table.c.job == job_id).order_by(table.c.nodes), ObservationRow
        )

    def observation_history(self, job_id: str) -> list[ObservationRow]:
        """The job's observations as they came, oldest first; at most HISTORY_PER_JOB."""
        table = schema.observation_history
        return self._all(
            select(table).where(table.c.job == job_id).order_by(table.c.seq), ObservationRow
        )

    def put_rescale(self, row: RescaleRow) -> None:
        """Store a rescale as it is known now; (job, generation) names it."""
        with self.transaction() as connection:
            _put(
                connection,
                schema.rescales,
                {"job": row.job, "generation": row.generation},
                encode(row),
            )

    def rescales(self, job_id: str) -> list[RescaleRow]:
        """The job's rescales, oldest first."""
        table = schema.rescales
        return self._all(
            select(table).where(table.c.job == job_id).order_by(table.c.generation), RescaleRow
        )

    def rescale_counts(self) -> dict[str, int]:
        """How often each job was rescaled; jobs that never were are left out."""
        with self.transaction() as connection:
            return _counts(connection, schema.rescales, "job")

    def put_profile(self, row: ProfileRow) -> ProfileRow:
        """Store what is known of a job's scaling as it is now."""
        with self.transaction() as connection:
            _put(connection, schema.profiles, {"job": row.job}, encode(row))
            return row

    def profile(self, job_id: str) -> ProfileRow | None:
        """What is known of the job's scaling."""
        return self._one(select(schema.profiles).where(schema.profiles.c.job == job_id), ProfileRow)

    def put_curve(self, row: CurveRow) -> None:
        """Keep the newest curve of a kind of job."""
        with self.transaction() as connection:
            _put(connection, schema.curves, {"key": row.key}, encode(row))

    def curve(self, key: str) -> CurveRow | None:
        """The curve of exactly this kind of job."""
        return self._one(select(schema.curves).where(schema.curves.c.key == key), CurveRow)

    def curves(self, node_class: str, processes: int, limit: int = 200) -> list[CurveRow]:
        """The newest curves on this class of nodes with so many processes on each, the newest
        first.
        """
        table = schema.curves
        query = select(table).where(
            table.c.node_class == node_class, table.c.processes == processes
        )
        return self._all(query.order_by(table.c.updated.desc(), table.c.key).limit(limit), CurveRow)

    def totals(self) -> Totals:
        """Sums over everything stored."""
        with self.transaction() as connection:
            sums = connection.execute(
                select(func.sum(schema.jobs.c.samples), func.sum(schema.jobs.c.node_seconds))
            ).one()
            return Totals(
                jobs=_counts(connection, schema.jobs, "state"),
                rescales=_counts(connection, schema.rescales, "kind"),
                events=_counts(connection, schema.events, "kind"),
                samples=float(sums[0] or 0),
                node_seconds=float(sums[1] or 0),
            )

    # --- inside ---

    def _all(self, query: Select[Any], kind: type[Row]) -> list[Row]:
        with self.transaction() as connection:
            return [decode(kind, row) for row in connection.execute(query).mappings()]

    def _one(self, query: Select[Any], kind: type[Row]) -> Row | None:
        return next(iter(self._all(query, kind)), None)

    def _update(
        self, table: Table, kind: type[Row], row_id: str, changes: Mapping[str, Any]
    ) -> Row:
        unknown = changes.keys() - {field.name for field in fields(kind)} | changes.keys() & {"id"}
        if unknown:
            raise TypeError(
                f"A {kind.__name__} has no field {', '.join(sorted(unknown))} that can be set."
            )
        with self.transaction() as connection:
            if changes:
                connection.execute(
                    update(table).where(table.c.id == row_id).values(encode_values(changes))
                )
            row = self._one(select(table).where(table.c.id == row_id), kind)
            if row is None:
                raise StoreError(
                    f'The database has no row "{row_id}" in {table.name}; it was never stored.'
                )
            return row


def _get_meta(connection: Connection, key: str) -> str | None:
    table = schema.meta
    return connection.execute(
        select(table.c.value).where(table.c.key == key).with_for_update()
    ).scalar()


def _set_meta(connection: Connection, key: str, value: str) -> None:
    _put(connection, schema.meta, {"key": key}, {"key": key, "value": value})


def _next(connection: Connection, counter: str) -> int:
    number = int(_get_meta(connection, counter) or 0) + 1
    _set_meta(connection, counter, str(number))
    return number


def _put(
    connection: Connection, table: Table, key: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """Update the row with this key, or insert it. One writer at a time, so that nothing comes in
    between.
    """
    match = [table.c[name] == value for name, value in key.items()]
    if connection.execute(update(table).where(*match).values(values)).rowcount == 0:
        connection.execute(insert(table).values(values))


def _of(query: Select[Any], job: str | None, node: str | None) -> Select[Any]:
    if job is not None:
        query = query.where(schema.events.c.job == job)
    if node is not None:
        query = query.where(schema.events.c.node == node)
    return query


def _counts(connection: Connection, table: Table, column: str) -> dict[str, int]:
    query = select(table.c[column], func.count()).group_by(table.c[column])
    return {row[0]: row[1] for row in connection.execute(query)}


def _number(row_id: str) -> int:
    if not (row_id[:1].isalpha() and row_id[1:].isdecimal()):
        raise ValueError(
            f'"{row_id}" is not an id; ids are a letter and a number and come from new_job_id() '
            "or new_lease_id()."
        )
    return int(row_id[1:])
