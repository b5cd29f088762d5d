"""The daemon's memory: jobs, leases, the audit log and what was measured, in a database.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from sqlalchemy import Connection, Select, func, or_, select

from malletrain.protocol.event_kinds import LeaseStatus
from malletrain.store import schema
from malletrain.store.database import StoreError, open_engine
from malletrain.store.goal_table import GoalTable
from malletrain.store.history_table import HistoryTable
from malletrain.store.many import ManyRows
from malletrain.store.records import (
    STARTED,
    Boot,
    CurveRow,
    EventRow,
    JobRow,
    LeaseRow,
    ObservationRow,
    ProfileRow,
    RescaleRow,
    ServiceRow,
    Totals,
)
from malletrain.store.retention import forget
from malletrain.store.rows import encode
from malletrain.store.series_table import SeriesTable
from malletrain.store.service_table import ServiceTable
from malletrain.store.session import LONGEST_PATTERN, Session
from malletrain.store.statements import AT, inserting, reading

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


RESTRAINT = "restraint"
"""The key of what operators have told the daemon to leave alone."""


class Store:
    """An open database. Make one with :meth:`open`; :meth:`close` it, or use it as a context
    manager.
    """

    def __init__(self, session: Session) -> None:
        self._db = session
        self.series = SeriesTable(session)
        self.goals = GoalTable(session)
        self.history = HistoryTable(session)
        self.services = ServiceTable(session)
        self.many = ManyRows(session)

    @classmethod
    def open(cls, url: str, verify: Callable[[], None] = lambda: None) -> Store:
        """Open the database at the SQLAlchemy URL ``url``, create it or migrate it to this version.
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
        """Close the database. Nothing is lost by not calling it."""
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The database's URL without its password."""
        return self._db.url

    def transaction(self) -> AbstractContextManager[Connection]:
        """Everything called inside is committed together, or not at all when an exception leaves
        the block. Blocks may nest.
        """
        return self._db.transaction()

    def savepoint(self) -> AbstractContextManager[None]:
        """A savepoint of the open transaction, to which it is rolled back when an exception leaves
        the block.
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
        """The daemon that used the database last, as JSON; None: that is not known."""
        return self._db.get_meta("origin")

    def put_origin(self, text: str) -> None:
        """Keep which daemon uses the database."""
        self._db.set_meta("origin", text)

    def place(self, of: Callable[[Connection], str]) -> str:
        """Where the database is, by what ``of`` makes of a connection to it."""
        with self.transaction() as connection:
            return of(connection)

    def last_notified(self) -> int | None:
        """The number of the last event of which owners were notified; None: they never were."""
        seq = self._db.get_meta("last_notified")
        return None if seq is None else int(seq)

    def set_last_notified(self, seq: int) -> None:
        """Owners have been notified of the events up to number ``seq``."""
        self._db.set_meta("last_notified", str(seq))

    # --- jobs ---

    def new_job_id(self) -> str:
        """The next job id: ``j1``, ``j2``, … Never given twice."""
        return f"j{self._db.next('last_job')}"

    def add_job(self, job: JobRow) -> JobRow:
        """Store a new job. Raises StoreError when its id is taken."""
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
        """Set fields of a job that is at hand, and return it with them. Raises as
        :meth:`update_job`.
        """
        return self._db.change(schema.jobs, JobRow, job, changes)

    def restraint(self) -> str | None:
        """What operators have told the daemon to leave alone, as JSON; None: nothing ever."""
        return self._db.get_meta(RESTRAINT)

    def put_restraint(self, text: str) -> None:
        """Keep what is to be left alone."""
        self._db.set_meta(RESTRAINT, text)

    def get_job(self, job_id: str) -> JobRow | None:
        """The job with exactly this id."""
        return self._db.one(reading(schema.jobs), JobRow, {AT + "id": job_id})

    def list_jobs(
        self,
        states: Iterable[str] | None = None,
        newest: int | None = None,
    ) -> list[JobRow]:
        """Jobs in order of submission, of these states if given; only so many of the ``newest`` if
        given.
        """
        number = schema.jobs.c.number
        query = (
            select(schema.jobs).order_by(number if newest is None else number.desc()).limit(newest)
        )
        if states is not None:
            query = query.where(schema.jobs.c.state.in_(list(states)))
        return self._db.all(query, JobRow)[:: 1 if newest is None else -1]

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
            if 0 < len(text) <= LONGEST_PATTERN and (
                rows := self._db.all(
                    select(table).where(condition).order_by(table.c.number), JobRow
                )
            ):
                return rows
        return []

    # --- leases ---

    def new_lease_id(self) -> str:
        """The next lease id: ``l1``, ``l2``, … Never given twice."""
        return self.new_lease_ids(1)[0]

    def new_lease_ids(self, count: int) -> list[str]:
        """The next so many."""
        first = self._db.next("last_lease", count)
        return [f"l{number}" for number in range(first, first + count)]

    def add_leases(self, leases: Sequence[LeaseRow]) -> None:
        """Store new leases. Raises StoreError when one's id is taken."""
        rows = [{**encode(lease), "number": _number(lease.id)} for lease in leases]
        self._db.add(schema.leases, rows)

    def change_leases(
        self, changes: Sequence[tuple[LeaseRow, Mapping[str, Any]]]
    ) -> list[LeaseRow]:
        """Set the same fields of leases that are at hand, of each to its own values; returns them
        with these. Raises as :meth:`update_lease`.
        """
        return self._db.change_all(schema.leases, LeaseRow, changes)

    def put_lease(self, lease: LeaseRow) -> LeaseRow:
        """Store a lease as it is now, new or not."""
        self._db.put(schema.leases, {**encode(lease), "number": _number(lease.id)})
        return lease

    def update_lease(self, lease_id: str, **changes: Any) -> LeaseRow:
        """Set fields of a lease and return it. Raises StoreError for an unknown lease, TypeError
        for an unknown field.
        """
        return self._db.update(schema.leases, LeaseRow, lease_id, changes)

    def get_lease(self, lease_id: str) -> LeaseRow | None:
        """The lease with exactly this id."""
        return self._db.one(reading(schema.leases), LeaseRow, {AT + "id": lease_id})

    def active_leases(self) -> list[LeaseRow]:
        """Leases that have not ended, oldest first."""
        table = schema.leases
        return self._db.all(
            select(table).where(table.c.state != LeaseStatus.ENDED).order_by(table.c.number),
            LeaseRow,
        )

    def list_leases(self) -> list[LeaseRow]:
        """All leases, oldest first."""
        return self._db.all(select(schema.leases).order_by(schema.leases.c.number), LeaseRow)

    # --- the audit log ---

    def add_event(self, row: EventRow) -> None:
        """Append an event; the database gives it its number."""
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
        """At most so many events after number ``seq``, oldest first; of this job, these kinds."""
        table = schema.events.c
        query = _events(job).where(table.seq > seq)
        if kinds is not None:
            query = query.where(table.kind.in_([str(kind) for kind in kinds]))
        return self._db.all(query.order_by(table.seq).limit(limit), EventRow)

    def last_events(self, limit: int = 100, job: str | None = None) -> list[EventRow]:
        """The newest ``limit`` events, oldest of them first, of this job if given."""
        query = _events(job).order_by(schema.events.c.seq.desc()).limit(limit)
        return self._db.all(query, EventRow)[::-1]

    def events_of(self, kind: str, since: float) -> list[EventRow]:
        """The events of this kind since that time, oldest first."""
        table = schema.events.c
        query = _events(None).where(table.kind == str(kind), table.time >= since)
        return self._db.all(query.order_by(table.seq), EventRow)

    def job_events(self, job: str, kinds: Iterable[str]) -> list[EventRow]:
        """The job's events of these kinds, oldest first."""
        query = _events(job).where(schema.events.c.kind.in_([str(kind) for kind in kinds]))
        return self._db.all(query.order_by(schema.events.c.seq), EventRow)

    # --- what was measured ---

    def put_observation(self, row: ObservationRow) -> None:
        """Keep ``row`` as what is known of the job at that scale now."""
        self._db.put(schema.observations, encode(row))

    def observations(self, job_id: str) -> list[ObservationRow]:
        """What is known of the job's throughput, one row a scale, smallest first."""
        table = schema.observations
        return self._db.all(
            select(table).where(table.c.job == job_id).order_by(table.c.nodes), ObservationRow
        )

    def put_rescale(self, row: RescaleRow) -> None:
        """Store a rescale as it is known now; (job, generation) names it."""
        self._db.put(schema.rescales, encode(row))

    def rescales(self, job_id: str) -> list[RescaleRow]:
        """The job's rescales, oldest first."""
        table = schema.rescales
        return self._db.all(
            select(table).where(table.c.job == job_id).order_by(table.c.generation), RescaleRow
        )

    def rescale_counts(self) -> dict[str, int]:
        """How often each job was rescaled, its starts not counted; jobs that never were are left
        out.
        """
        return self._db.counts(schema.rescales, "job", schema.rescales.c.kind != STARTED)

    def put_profile(self, row: ProfileRow) -> ProfileRow:
        """Store what is known of a job's scaling as it is now."""
        self._db.put(schema.profiles, encode(row))
        return row

    def profile(self, job_id: str) -> ProfileRow | None:
        """What is known of the job's scaling."""
        return self._db.one(
            select(schema.profiles).where(schema.profiles.c.job == job_id), ProfileRow
        )

    def put_curve(self, row: CurveRow) -> None:
        """Keep the newest curve of a kind of job."""
        self._db.put(schema.curves, encode(row))

    def curve(self, key: str) -> CurveRow | None:
        """The curve of exactly this kind of job."""
        return self._db.one(select(schema.curves).where(schema.curves.c.key == key), CurveRow)

    def curves(self, node_class: str, processes: int, limit: int = 200) -> list[CurveRow]:
        """The newest curves on this class of nodes with so many processes on each, the newest
        first.
        """
        table = schema.curves
        query = select(table).where(
            table.c.node_class == node_class, table.c.processes == processes
        )
        return self._db.all(
            query.order_by(table.c.updated.desc(), table.c.key).limit(limit), CurveRow
        )

    # --- what is kept no longer ---

    def forget(self, before: float) -> int:
        """Delete some of the leases and jobs that ended before this time, epoch seconds; how many,
        0 when there are no more.
        """
        return forget(self._db, before)

    def totals(self) -> Totals:
        """Sums over everything stored."""
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
            "or new_lease_id()."
        )
    return int(row_id[1:])
