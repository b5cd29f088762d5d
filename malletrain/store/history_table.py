"""What was, of many jobs and leases: some rows at a time, for sums over all of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, or_, select

from malletrain.store import schema
from malletrain.store.records import EventRow, JobRow, LeaseRow, RescaleRow
from malletrain.store.session import Session


class HistoryTable:
    """Reads jobs, leases, and the rescales and events of jobs."""

    def __init__(self, session: Session) -> None:
        self._db = session

    def jobs(
        self, since: float, until: float, owner: str | None, after: int, limit: int
    ) -> list[JobRow]:
        """The jobs that were there at some time between ``since`` and ``until``, ``limit`` at most,
        with greater numbers than ``after``, in order of their numbers. ``owner``: whose; None:
        everybody's.
        """
        there = _between(schema.jobs, schema.jobs.c.submitted, since, until, owner, after)
        return self._db.all(there.limit(limit), JobRow)

    def leases(
        self, since: float, until: float, owner: str | None, after: int, limit: int
    ) -> list[LeaseRow]:
        """As :meth:`jobs`, the leases that ran."""
        ran = _between(schema.leases, schema.leases.c.started, since, until, owner, after)
        return self._db.all(ran.limit(limit), LeaseRow)

    def rescales(self, jobs: Collection[str]) -> list[RescaleRow]:
        """Those of these jobs, of each the oldest first."""
        table = schema.rescales
        query = select(table).where(table.c.job.in_(list(jobs)))
        return self._db.all(query.order_by(table.c.job, table.c.generation), RescaleRow)

    def events(
        self, jobs: Collection[str], kinds: Collection[str], after: int, limit: int
    ) -> list[EventRow]:
        """Those of these jobs and kinds, oldest first, ``limit`` at most with greater numbers than
        ``after``.
        """
        table = schema.events.c
        condition = table.job.in_(list(jobs)) & table.kind.in_([str(kind) for kind in kinds])
        query = select(schema.events).where(condition, table.seq > after)
        return self._db.all(query.order_by(table.seq).limit(limit), EventRow)


def _between(
    table: Table,
    began: ColumnElement[float],
    since: float,
    until: float,
    owner: str | None,
    after: int,
) -> Select[Any]:
    """Rows of what has a number, an owner and an end, in order of their numbers."""
    c = table.c
    overlap = (began < until) & or_(c.ended.is_(None), c.ended > since) & (c.number > after)
    query = select(table).where(overlap).order_by(c.number)
    return query if owner is None else query.where(c.owner == owner)
