"""Reads the history of many jobs and leases, some rows at a time, for sums over all of them."""

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
        """Return jobs that existed in a period, in order of their numbers.

        Args:
            since: start of the period, epoch seconds.
            until: end of the period, epoch seconds.
            owner: owner of the jobs; None for all owners.
            after: number before that of the first returned job.
            limit: maximum number of jobs.

        """
        query = _between(schema.jobs, schema.jobs.c.submitted, since, until, owner, after)
        return self._db.all(query.limit(limit), JobRow)

    def leases(
        self, since: float, until: float, owner: str | None, after: int, limit: int
    ) -> list[LeaseRow]:
        """Like :meth:`jobs`, for leases that ran in the period."""
        query = _between(schema.leases, schema.leases.c.started, since, until, owner, after)
        return self._db.all(query.limit(limit), LeaseRow)

    def rescales(self, jobs: Collection[str]) -> list[RescaleRow]:
        """Return the rescales of the jobs, the oldest of each job first."""
        table = schema.rescales
        query = select(table).where(table.c.job.in_(list(jobs)))
        return self._db.all(query.order_by(table.c.job, table.c.generation), RescaleRow)

    def events(
        self, jobs: Collection[str], kinds: Collection[str], after: int, limit: int
    ) -> list[EventRow]:
        """Return events of jobs, oldest first.

        Args:
            jobs: ids of the jobs.
            kinds: kinds of the events.
            after: number before that of the first returned event.
            limit: maximum number of events.

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
    """Return a query for the rows of a table with numbers, owners and ends, in order of their
    numbers.
    """
    c = table.c
    overlap = (began < until) & or_(c.ended.is_(None), c.ended > since) & (c.number > after)
    query = select(table).where(overlap).order_by(c.number)
    return query if owner is None else query.where(c.owner == owner)
