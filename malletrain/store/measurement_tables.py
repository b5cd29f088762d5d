"""Stores what was measured of jobs: metrics over time, and the starts of services.

A long series is downsampled so that its size is bounded and its plot looks the same. Values are
numbered from 0. They fall into buckets of equal width, and the smallest and the largest value of
each bucket are kept: what a plot of as many pixels shows (Jugel et al., M4, VLDB 2014, without the
first and last of each bucket). The first and the newest value are kept too. The bucket width
depends only on the number of values: it doubles when too many would be kept. So only the values
have to be stored.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

from sqlalchemy import delete, insert, select

from malletrain.store import schema
from malletrain.store.records import MetricRow, ServiceStartsRow, encode
from malletrain.store.session import Session

MAX_POINTS = 500
"""Maximum number of values of a series."""


class Numbered(Protocol):
    """One value of a series."""

    @property
    def number(self) -> int:
        """Index of the value in the series, from 0."""

    @property
    def value(self) -> float:
        """The value."""


PointT = TypeVar("PointT", bound=Numbered)


def width(count: int, max_points: int = MAX_POINTS) -> int:
    """Return the bucket width for a series of ``count`` values: the smallest power of two with
    which at most ``max_points`` values are kept. A ``max_points`` below 4 counts as 4.
    """
    bucket_width = 1
    # One bucket of width w keeps min(w, 2) values; the first and the newest value are kept in
    # addition.
    while (
        -(-count // bucket_width) * min(bucket_width, 2) + 2 > max(max_points, 4)
        and bucket_width < count
    ):
        bucket_width *= 2
    return bucket_width


def thinned(points: Sequence[PointT], count: int, max_points: int = MAX_POINTS) -> list[PointT]:
    """Return the values to keep, in order: the smallest and the largest of each bucket, the first
    and the newest. One call and many calls on growing series give the same result.

    Args:
        points: values in order of index. Values that an earlier call removed are missing.
        count: total number of values of the series. It determines the bucket width.
        max_points: maximum number of values to keep.
    """
    bucket_width = width(count, max_points)
    buckets: dict[int, list[PointT]] = {}
    for point in points:
        buckets.setdefault(point.number // bucket_width, []).append(point)
    selected: dict[int, PointT] = {p.number: p for p in points[-1:]}
    if points and not points[0].number:
        selected[0] = points[0]
    for bucket in buckets.values():
        for point in (min(bucket, key=_sort_key), max(bucket, key=_sort_key)):
            selected[point.number] = point
    return [selected[number] for number in sorted(selected)]


def _sort_key(point: Numbered) -> float:
    """Sort key of a point. NaN sorts above all numbers, so that a plot shows it."""
    return math.inf if math.isnan(point.value) else point.value


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
