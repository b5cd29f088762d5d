"""Stores the values of a job's metrics.

Decides which incoming values are new and stored. Values of one name come from one rank of a round,
the lowest that reports it, so they form a curve. :mod:`malletrain.core.thinning` decides how many
are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from malletrain.core.thinning import MAX_POINTS, thinned, width
from malletrain.protocol.views import SeriesView
from malletrain.store.records import JobRow, MetricRow
from malletrain.store.series_table import SeriesTable

MAX_VALUES, MIN_VALUES_PER_METRIC = 50_000, 100
"""Maximum number of values in one answer, for all metrics together; minimum number of values of
each metric if there are many metrics.
"""


class Value(NamedTuple):
    """One reported value of a metric."""

    time: float
    """Time of the report, seconds since the epoch."""
    value: float
    """The value."""
    step: int | None
    """Step of the script; None if it states none."""
    samples: float
    """Samples that the job had processed."""
    nodes: int
    """Number of the job's nodes."""


class GrowingSeries:
    """One metric of an unfinished job. Use it within a transaction of the core."""

    def __init__(self, table: SeriesTable, job: str, name: str) -> None:
        self._table, self._job, self._name = table, job, name
        newest = table.newest(job, name)
        self._count = newest.number + 1 if newest else 0
        stride = width(self._count)
        self._tail = table.tail(job, name, max(0, self._count - 1) // stride * stride)
        self._source: tuple[int, int] | None = None
        self._source_start = self._count
        """Number of values before the current source."""
        self._last = newest.time if newest else 0.0

    def add(self, generation: int, rank: int, values: Iterable[Value]) -> None:
        """Add the values that a rank reports. Repeated values, such as those that an agent sends
        again after a reconnection, are ignored.

        Args:
            generation: number of the round.
            rank: rank of the worker.
            values: values, the oldest first.

        """
        source = (generation, rank)
        if self._source is not None and source != self._source:
            late = generation < self._source[0]
            if late or (generation == self._source[0] and rank > self._source[1]):
                return
            self._last = 0.0  # another process, of another clock
            if generation == self._source[0]:
                self._remove_source()
        if source != self._source:
            self._source, self._source_start = source, self._count
        rows: list[MetricRow] = []
        for v in values:
            if v.time > self._last:
                self._last = v.time
                number = self._count + len(rows)
                rows.append(
                    MetricRow(
                        self._job, self._name, number, v.time, v.value, v.step, v.samples, v.nodes
                    )
                )
        if rows:
            self._append(rows)

    def _remove_source(self) -> None:
        """Remove the values of a higher rank in this round, because a lower rank reports, too."""
        self._table.replace(self._job, self._name, self._source_start, [])
        stride = width(self._source_start)
        self._count = self._source_start
        first = max(0, self._count - 1) // stride * stride
        self._tail = self._table.tail(self._job, self._name, first)

    def _append(self, rows: list[MetricRow]) -> None:
        count = self._count + len(rows)
        stride = width(count)
        if stride == width(self._count):
            base = self._tail
        else:
            base = self._table.rows(self._job, [self._name])
        selected = thinned([*base, *rows], count)
        self._table.replace(self._job, self._name, (base or rows)[0].number, selected)
        self._count = count
        self._tail = [row for row in selected if row.number >= (count - 1) // stride * stride]


def series_views(
    table: SeriesTable, job: JobRow, names: Collection[str], since: float, most: int
) -> list[SeriesView]:
    """Return the metrics of a job over time, thinned to the size of one answer.

    Args:
        table: table of the stored values.
        job: row of the job.
        names: names of the metrics; empty for all.
        since: time before the first returned value, seconds since the epoch.
        most: maximum number of values of each metric; 0 for all that are stored.
    """
    by_name: dict[str, list[MetricRow]] = {}
    for row in table.rows(job.id, names):
        by_name.setdefault(row.name, []).append(row)
    most = min(most or MAX_POINTS, max(MIN_VALUES_PER_METRIC, MAX_VALUES // max(1, len(by_name))))
    views = []
    for name, rows in by_name.items():
        count = rows[-1].number + 1
        shown = [row for row in thinned(rows, count, most) if row.time > since]
        views.append(
            SeriesView(
                name,
                tuple(row.value for row in shown),
                tuple(row.time for row in shown),
                tuple(row.samples for row in shown),
                tuple(row.nodes for row in shown),
                tuple(row.step for row in shown),
                count,
                tuple(row.number for row in shown),
            )
        )
    return views
