"""Stores what was measured of jobs: metrics over time, of which
:mod:`malletrain.core.downsampling` decides which values are kept, and the starts of services.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import delete, insert, select

from malletrain.store import schema
from malletrain.store.records import MetricRow, ServiceStartsRow
from malletrain.store.rows import encode
from malletrain.store.session import Session


class SeriesTable:
    """Reads and writes series. A series is a job and the name of a metric."""

    def __init__(self, session: Session) -> None:
        self._db = session

    def names(self, job: str) -> list[str]:
        """Return the names of the job's metrics."""
        table = schema.metric_points.c
        query = select(table.name).where(table.job == job).distinct().order_by(table.name)
        with self._db.transaction() as connection:
            return list(connection.execute(query).scalars())

    def rows(
        self, job: str, names: Collection[str] = (), since: float | None = None
    ) -> list[MetricRow]:
        """Return the stored values of metrics, by name and in order.

        Args:
            job: id of the job.
            names: names of the metrics; empty for all.
            since: time before the first returned value, seconds; None for all values.

        """
        table = schema.metric_points
        query = select(table).where(table.c.job == job)
        if names:
            query = query.where(table.c.name.in_(list(names)))
        if since is not None:
            query = query.where(table.c.time > since)
        return self._db.all(query.order_by(table.c.name, table.c.number), MetricRow)

    def newest(self, job: str, name: str) -> MetricRow | None:
        """Return the newest value of a series; None if it has none."""
        table = schema.metric_points
        query = select(table).where(table.c.job == job, table.c.name == name)
        return self._db.one(query.order_by(table.c.number.desc()).limit(1), MetricRow)

    def tail(self, job: str, name: str, first: int) -> list[MetricRow]:
        """Return the stored values of a series from number ``first`` on, in order.

        Args:
            job: id of the job.
            name: name of the metric.
            first: number of the first value.
        """
        table = schema.metric_points
        conditions = (table.c.job == job, table.c.name == name, table.c.number >= first)
        return self._db.all(select(table).where(*conditions).order_by(table.c.number), MetricRow)

    def replace(self, job: str, name: str, first: int, rows: Sequence[MetricRow]) -> None:
        """Replace the stored values of a series from number ``first`` on by ``rows``.

        Args:
            job: id of the job.
            name: name of the metric.
            first: number of the first replaced value.
            rows: the new values, in order.
        """
        table = schema.metric_points
        stale = (table.c.job == job) & (table.c.name == name) & (table.c.number >= first)
        with self._db.transaction() as connection:
            connection.execute(delete(table).where(stale))
            if rows:
                connection.execute(insert(table), [encode(row) for row in rows])


class ServiceStartsTable:
    """The measured starts of services."""

    def __init__(self, session: Session) -> None:
        self._db = session

    def put(self, row: ServiceStartsRow) -> None:
        """Store the starts of a service on a class of nodes: insert or replace the row."""
        self._db.put(schema.service_starts, encode(row))

    def of(self, job_id: str) -> dict[str, tuple[float, ...]]:
        """Return node class → measured starts of a service there, oldest first, seconds."""
        table = schema.service_starts
        rows = self._db.all(select(table).where(table.c.job == job_id), ServiceStartsRow)
        return {row.node_class: row.durations for row in rows}
