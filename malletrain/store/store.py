"""Stores jobs, leases, the audit log and measurements in a database.

:class:`Store` decides how rows are read and written, that each call is one short transaction (or
part of the one opened with :meth:`Store.transaction`), and that a database of an earlier version is
migrated and one of a later version refused. It does not decide which columns are stored
(:mod:`malletrain.store.schema`) nor when.

When a call returns, its changes are on disk: ``kill -9`` loses nothing of them. All calls are
synchronous and come from one thread, the daemon's loop. The default database is SQLite with a
write-ahead log; a URL selects any other that SQLAlchemy supports.

:class:`GoalTable` stores the goals of jobs and the past numbers of nodes, :class:`ServiceTable` the
service to each party. :class:`ManyRows` reads rows of many jobs together: a starting daemon needs
the rows of all unfinished jobs, and one query per job would take many times as long.

:func:`forget` deletes old leases and ended jobs. It decides in which order and how many at a time;
the configuration has the retention time. The audit log is append-only and stays.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from sqlalchemy import Column, Connection, Select, bindparam, delete, func, or_, select

from malletrain.protocol.event_kinds import LeaseStatus
from malletrain.store import schema
from malletrain.store.database import StoreError, open_engine
from malletrain.store.history_table import HistoryTable
from malletrain.store.measurement_tables import SeriesTable, ServiceStartsTable
from malletrain.store.records import (
    STARTED,
    Boot,
    CurveRow,
    EventRow,
    GoalRow,
    JobRow,
    LayoutRow,
    LayoutSearchRow,
    LeaseRow,
    NodeSpanRow,
    ObservationRow,
    ProfileRow,
    RescaleRow,
    Row,
    ServiceRow,
    Totals,
    encode,
)
from malletrain.store.session import AT, MAX_PATTERN_LENGTH, Session, inserting, reading
from malletrain.store.task_table import TASKS_AT_ONCE, TaskTable, forget_tasks


class GoalTable:
    """Reads and writes goals, one row per job, and the past numbers of nodes."""

    def __init__(self, session: Session) -> None:
        self._db = session

    def put(self, row: GoalRow) -> GoalRow:
        """Store a job's goals: insert or replace its row."""
        self._db.put(schema.goals, encode(row))
        return row

    def of(self, job_id: str) -> GoalRow | None:
        """Return the job's goals; None if it has none."""
        return self._db.one(select(schema.goals).where(schema.goals.c.job == job_id), GoalRow)

    def all(self) -> dict[str, GoalRow]:
        """Return job → its goals, for jobs that have any."""
        return {row.job: row for row in self._db.all(select(schema.goals), GoalRow)}

    def put_spans(self, rows: Iterable[NodeSpanRow], forget_before: float) -> None:
        """Store numbers of nodes, and delete rows before ``forget_before``, epoch seconds."""
        table = schema.node_history
        with self._db.transaction() as connection:
            for row in rows:
                self._db.put(table, encode(row))
            connection.execute(delete(table).where(table.c.began < forget_before))

    def spans(self, since: float) -> list[NodeSpanRow]:
        """Return the numbers of nodes since a time, oldest first."""
        table = schema.node_history
        return self._db.all(
            select(table).where(table.c.began >= since).order_by(table.c.began), NodeSpanRow
        )


JOBS_AT_ONCE = 500
"""Number of rows per query. SQLite and PostgreSQL limit the number of parameters to some
thousands.
"""


class ManyRows:
    """Reads rows by their keys. Keys without a row are missing in the results."""

    def __init__(self, session: Session) -> None:
        self._db = session

    def jobs(self, ids: Iterable[str]) -> dict[str, JobRow]:
        """Return id → job."""
        return {row.id: row for row in self._of(schema.jobs.c.id, JobRow, ids)}

    def profiles(self, jobs: Iterable[str]) -> dict[str, ProfileRow]:
        """Return job → its profile."""
        return {row.job: row for row in self._of(schema.profiles.c.job, ProfileRow, jobs)}

    def goals(self, jobs: Iterable[str]) -> dict[str, GoalRow]:
        """Return job → its goals."""
        return {row.job: row for row in self._of(schema.goals.c.job, GoalRow, jobs)}

    def curves(self, keys: Iterable[str]) -> dict[str, CurveRow]:
        """Return profile key → its curve."""
        return {row.key: row for row in self._of(schema.curves.c.key, CurveRow, keys)}

    def _of(self, column: Column[Any], kind: type[Row], values: Iterable[str]) -> Iterator[Row]:
        keys = sorted(set(values))
        for first in range(0, len(keys), JOBS_AT_ONCE):
            some = keys[first : first + JOBS_AT_ONCE]
            yield from self._db.all(_query(column), kind, {"some": some})


@cache
def _query(column: Column[Any]) -> Select[Any]:
    """Return the query for the rows in which this column has one of the values of the parameter
    ``some``.
    """
    return select(column.table).where(column.in_(bindparam("some", expanding=True)))


class ServiceTable:
    """Reads and writes the service, one row per party."""

    def __init__(self, session: Session) -> None:
        self._db = session

    def put(self, row: ServiceRow) -> None:
        """Store the service to a party."""
        self._db.put(schema.service, encode(row))

    def all(self) -> list[ServiceRow]:
        """Return the service to each party, in order of their names."""
        return self._db.all(select(schema.service).order_by(schema.service.c.party), ServiceRow)


ROWS_AT_ONCE = 1000
"""Maximum number of jobs, and of leases, that one call deletes. The daemon is blocked meanwhile."""
JOB_TABLES = (
    schema.observations,
    schema.rescales,
    schema.profiles,
    schema.metric_points,
    schema.goals,
    schema.layout_searches,
    schema.service_starts,
)


def forget(db: Session, before: float) -> int:
    """Delete leases and jobs that ended before this time (epoch seconds), the oldest first, with
    their measurements and tasks. Return the number of deleted leases and jobs, or tasks if more of
    these remain; 0 if none is left.
    """
    with db.transaction() as connection:
        counts = {}
        for table in (schema.jobs, schema.leases):
            query = select(table.c.id).where(table.c.ended < before)
            ids = (
                connection.execute(query.order_by(table.c.number).limit(ROWS_AT_ONCE))
                .scalars()
                .all()
            )
            if table is schema.jobs and (deleted := forget_tasks(db, ids)) >= TASKS_AT_ONCE:
                return deleted  # the jobs follow when their tasks are gone
            for child in JOB_TABLES if table is schema.jobs else ():
                connection.execute(delete(child).where(child.c.job.in_(ids)))
            connection.execute(delete(table).where(table.c.id.in_(ids)))
            counts[table.name] = len(ids)
        return sum(counts.values())


__all__ = [
    "Boot",
    "CurveRow",
    "EventRow",
    "JobRow",
    "LeaseRow",
    "ObservationRow",
    "ProfileRow",
    "RescaleRow",
    "ServiceRow",
    "Store",
    "StoreError",
    "Totals",
]


SLOT_PARTS = "slot_parts"
"""Key of the parts of a host that slots of each kind are."""
RESTRICTIONS = "restraint"
"""Key of the operators' restrictions of leasing; stored databases have this word."""


class Store:
    """An open database. Create it with :meth:`open`. Call :meth:`close`, or use it as a context
    manager.
    """

    def __init__(self, session: Session) -> None:
        self._db = session
        self.series = SeriesTable(session)
        self.tasks = TaskTable(session)
        self.goals = GoalTable(session)
        self.service_starts = ServiceStartsTable(session)
        self.history = HistoryTable(session)
        self.services = ServiceTable(session)
        self.many = ManyRows(session)

    @classmethod
    def open(cls, url: str, verify: Callable[[], None] = lambda: None) -> Store:
        """Open the database at the SQLAlchemy URL ``url``. It is created or migrated if necessary.
        ``verify``: see :class:`~malletrain.store.session.Session`.

        Raises:
            StoreError: it cannot be opened, or a later version of MalleTrain wrote it.
        """
        store = cls(Session(open_engine(url), verify))
        try:
            store._db.migrate()
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Close the database. No data is lost without this call."""
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def transaction(self) -> AbstractContextManager[Connection]:
        """Run the block as one transaction: it is committed as a whole, or rolled back if an
        exception leaves the block. Blocks may nest.
        """
        return self._db.transaction()

    def savepoint(self) -> AbstractContextManager[None]:
        """Set a savepoint in the open transaction. If an exception leaves the block, only the block
        is rolled back.
        """
        return self._db.savepoint()

    # --- the daemon itself ---

    def boot(self) -> Boot:
        """Count one start of the daemon."""
        with self.transaction():
            daemon_id = self._db.get_meta("daemon_id") or uuid.uuid4().hex
            self._db.set_meta("daemon_id", daemon_id)
            return Boot(daemon_id, self._db.next("boots"))

    def origin(self) -> str | None:
        """Return the daemon that used the database last, as JSON; None if unknown."""
        return self._db.get_meta("origin")

    def put_origin(self, text: str) -> None:
        """Store which daemon uses the database."""
        self._db.set_meta("origin", text)

    def place(self, of: Callable[[Connection], str]) -> str:
        """Return the location of the database. ``of``: returns it from a connection."""
        with self.transaction() as connection:
            return of(connection)

    def last_notified(self) -> int | None:
        """Return the number of the last event of which owners were notified; None if there was
        none.
        """
        seq = self._db.get_meta("last_notified")
        return None if seq is None else int(seq)

    def set_last_notified(self, seq: int) -> None:
        """Store the number of the last event of which owners were notified."""
        self._db.set_meta("last_notified", str(seq))

    # --- jobs ---

    def new_job_id(self) -> str:
        """Return the next job id: ``j1``, ``j2``, … Ids are never reused."""
        return f"j{self._db.next('last_job')}"

    def add_job(self, job: JobRow) -> JobRow:
        """Store a new job. Raises StoreError if its id exists."""
        with self.transaction() as connection:
            values = {**encode(job), "number": _number(job.id)}
            connection.execute(inserting(schema.jobs), values)
            return job

    def update_job(self, job_id: str, **changes: Any) -> JobRow:
        """Set fields of a job and return it. Raises StoreError for an unknown job, TypeError for an
        unknown field.
        """
        return self._db.update(schema.jobs, JobRow, job_id, changes)

    def change_job(self, job: JobRow, **changes: Any) -> JobRow:
        """Set fields of a job in memory. Return the changed row. Raises as :meth:`update_job`."""
        return self._db.change(schema.jobs, JobRow, job, changes)

    def restrictions(self) -> str | None:
        """Return the operators' restrictions as JSON; None if there have been none."""
        return self._db.get_meta(RESTRICTIONS)

    def put_restrictions(self, text: str) -> None:
        """Store the operators' restrictions, as JSON."""
        self._db.set_meta(RESTRICTIONS, text)

    def slot_parts(self) -> str | None:
        """Return kind of slots → the part of a host that one is, as JSON; None if unknown."""
        return self._db.get_meta(SLOT_PARTS)

    def put_slot_parts(self, text: str) -> None:
        """Store the parts of a host that slots of each kind are."""
        self._db.set_meta(SLOT_PARTS, text)

    def get_job(self, job_id: str) -> JobRow | None:
        """Return the job with exactly this id; None if there is none."""
        return self._db.one(reading(schema.jobs), JobRow, {AT + "id": job_id})

    def list_jobs(
        self,
        states: Iterable[str] | None = None,
        newest: int | None = None,
    ) -> list[JobRow]:
        """Return jobs in order of submission.

        Args:
            states: states of the jobs; None for all.
            newest: maximum number of jobs, the newest; None for all.

        """
        number = schema.jobs.c.number
        query = (
            select(schema.jobs).order_by(number if newest is None else number.desc()).limit(newest)
        )
        if states is not None:
            query = query.where(schema.jobs.c.state.in_(list(states)))
        return self._db.all(query, JobRow)[:: 1 if newest is None else -1]

    def find_jobs(self, text: str) -> list[JobRow]:
        """Return the jobs that ``text`` may mean: the one with that id; else those of that name;
        else those whose id or name starts with it.

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
            if 0 < len(text) <= MAX_PATTERN_LENGTH and (
                rows := self._db.all(
                    select(table).where(condition).order_by(table.c.number), JobRow
                )
            ):
                return rows
        return []

    # --- leases ---

    def new_lease_ids(self, count: int) -> list[str]:
        """Return the next ``count`` lease ids: ``l1``, ``l2``, … Ids are never reused."""
        first = self._db.next("last_lease", count)
        return [f"l{number}" for number in range(first, first + count)]

    def add_leases(self, leases: Sequence[LeaseRow]) -> None:
        """Store new leases. Raises StoreError if an id exists."""
        rows = [{**encode(lease), "number": _number(lease.id)} for lease in leases]
        self._db.add(schema.leases, rows)

    def change_leases(
        self, changes: Sequence[tuple[LeaseRow, Mapping[str, Any]]]
    ) -> list[LeaseRow]:
        """Set the same fields of leases in memory, each to its own values. Return the changed
        rows. Raises StoreError for an unknown lease, TypeError for an unknown field.
        """
        return self._db.change_all(schema.leases, LeaseRow, changes)

    def get_lease(self, lease_id: str) -> LeaseRow | None:
        """Return the lease with exactly this id; None if there is none."""
        return self._db.one(reading(schema.leases), LeaseRow, {AT + "id": lease_id})

    def active_leases(self) -> list[LeaseRow]:
        """Return the leases that have not ended, oldest first."""
        table = schema.leases
        return self._db.all(
            select(table).where(table.c.state != LeaseStatus.ENDED).order_by(table.c.number),
            LeaseRow,
        )

    def list_leases(self) -> list[LeaseRow]:
        """Return all leases, oldest first."""
        return self._db.all(select(schema.leases).order_by(schema.leases.c.number), LeaseRow)

    # --- the audit log ---

    def add_event(self, row: EventRow) -> None:
        """Append an event. The database assigns its number."""
        values = encode(row)
        del values["seq"]
        self._db.append(schema.events, values)

    def events_since(
        self,
        seq: int = 0,
        limit: int = 1000,
        job: str | None = None,
        kinds: Iterable[str] | None = None,
    ) -> list[EventRow]:
        """Return the events after an event number, oldest first.

        Args:
            seq: number of the event.
            limit: maximum number of events.
            job: id of the job to which the events are limited; None for all.
            kinds: kinds of the events; None for all.
        """
        table = schema.events.c
        query = _events(job).where(table.seq > seq)
        if kinds is not None:
            query = query.where(table.kind.in_([str(kind) for kind in kinds]))
        return self._db.all(query.order_by(table.seq).limit(limit), EventRow)

    def last_events(self, limit: int = 100, job: str | None = None) -> list[EventRow]:
        """Return the newest ``limit`` events, the oldest of them first, of ``job`` if it is
        given.
        """
        query = _events(job).order_by(schema.events.c.seq.desc()).limit(limit)
        return self._db.all(query, EventRow)[::-1]

    def events_of(self, kind: str, since: float) -> list[EventRow]:
        """Return the events of a kind since a time, oldest first."""
        table = schema.events.c
        query = _events(None).where(table.kind == str(kind), table.time >= since)
        return self._db.all(query.order_by(table.seq), EventRow)

    def job_events(self, job: str, kinds: Iterable[str]) -> list[EventRow]:
        """Return the job's events of these kinds, oldest first."""
        query = _events(job).where(schema.events.c.kind.in_([str(kind) for kind in kinds]))
        return self._db.all(query.order_by(schema.events.c.seq), EventRow)

    # --- measurements ---

    def put_observation(self, row: ObservationRow) -> None:
        """Store the newest throughput of a job at one scale."""
        self._db.put(schema.observations, encode(row))

    def observations(self, job_id: str) -> list[ObservationRow]:
        """Return the job's throughput, one row per scale, the smallest scale first."""
        table = schema.observations
        return self._db.all(
            select(table).where(table.c.job == job_id).order_by(table.c.nodes), ObservationRow
        )

    def put_rescale(self, row: RescaleRow) -> None:
        """Store a rescale: insert or replace the row of (job, generation)."""
        self._db.put(schema.rescales, encode(row))

    def rescales(self, job_id: str) -> list[RescaleRow]:
        """Return the job's rescales, oldest first."""
        table = schema.rescales
        return self._db.all(
            select(table).where(table.c.job == job_id).order_by(table.c.generation), RescaleRow
        )

    def rescale_counts(self) -> dict[str, int]:
        """Return job → number of its rescales without starts, for jobs that have any."""
        return self._db.counts(schema.rescales, "job", schema.rescales.c.kind != STARTED)

    def put_profile(self, row: ProfileRow) -> ProfileRow:
        """Store the scaling of a job: insert or replace its row."""
        self._db.put(schema.profiles, encode(row))
        return row

    def profile(self, job_id: str) -> ProfileRow | None:
        """Return the scaling of a job; None if there is no row."""
        return self._db.one(
            select(schema.profiles).where(schema.profiles.c.job == job_id), ProfileRow
        )

    def put_curve(self, row: CurveRow) -> None:
        """Store the newest curve of a kind of jobs."""
        self._db.put(schema.curves, encode(row))

    def curve(self, key: str) -> CurveRow | None:
        """Return the curve with exactly this profile key; None if there is none."""
        return self._db.one(select(schema.curves).where(schema.curves.c.key == key), CurveRow)

    def curves(self, node_class: str, processes: int, limit: int = 200) -> list[CurveRow]:
        """Return the newest curves, the newest first.

        Args:
            node_class: class of the nodes.
            processes: number of processes per node.
            limit: maximum number of curves.

        """
        table = schema.curves
        query = select(table).where(
            table.c.node_class == node_class, table.c.processes == processes
        )
        return self._db.all(
            query.order_by(table.c.updated.desc(), table.c.key).limit(limit), CurveRow
        )

    def put_layout_search(self, row: LayoutSearchRow) -> LayoutSearchRow:
        """Store how a job looks for its layout: insert or replace its row."""
        self._db.put(schema.layout_searches, encode(row))
        return row

    def layout_search(self, job_id: str) -> LayoutSearchRow | None:
        """Return how a job looks for its layout; None if it does not."""
        table = schema.layout_searches
        return self._db.one(select(table).where(table.c.job == job_id), LayoutSearchRow)

    def put_layout(self, row: LayoutRow) -> None:
        """Store the best layout of a node for a kind of jobs."""
        self._db.put(schema.layouts, encode(row))

    def layout(self, key: str) -> LayoutRow | None:
        """Return the best layout of a node for this profile key; None if there is none."""
        table = schema.layouts
        return self._db.one(select(table).where(table.c.key == key), LayoutRow)

    # --- retention and totals ---

    def forget(self, before: float) -> int:
        """Delete some of the leases and jobs that ended before this time, epoch seconds. Returns
        their number; 0 if none is left.
        """
        return forget(self._db, before)

    def totals(self) -> Totals:
        """Return counts and sums over everything stored."""
        with self.transaction() as connection:
            samples = connection.execute(select(func.sum(schema.jobs.c.samples))).scalar()
            return Totals(
                jobs=self._db.counts(schema.jobs, "state"),
                rescales=self._db.counts(schema.rescales, "kind"),
                events=self._db.counts(schema.events, "kind"),
                samples=float(samples or 0),
            )


def _events(job: str | None) -> Select[Any]:
    query = select(schema.events)
    return query if job is None else query.where(schema.events.c.job == job)


def _number(row_id: str) -> int:
    if not (row_id[:1].isalpha() and row_id[1:].isdecimal()):
        raise ValueError(
            f'"{row_id}" is not an id; ids are a letter and a number and come from new_job_id() '
            "or new_lease_ids()."
        )
    return int(row_id[1:])
