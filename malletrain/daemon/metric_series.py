"""The stored values of a job's metric.

Decides which incoming values are new and which are stored. Values of one name come from one rank of
a round, the lowest that reports it, so they form a curve. :mod:`malletrain.core.thinning` decides
how many are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from malletrain.core.thinning import MAX_POINTS, thinned, width
from malletrain.protocol.views import SeriesView
from malletrain.store.records import JobRow, MetricRow
from malletrain.store.series_table import SeriesTable

MOST_SHOWN, LEAST_SHOWN = 50_000, 100
"""Values in one answer of all metrics together; of one metric, at least where there are many."""


class Value(NamedTuple):
    """One value that was reported."""

    time: float
    value: float
    step: int | None
    samples: float
    nodes: int


class GrowingSeries:
    """One metric of a job that has not ended. Use it within a step of the core."""

    def __init__(self, table: SeriesTable, job: str, name: str) -> None:
        self._table, self._job, self._name = table, job, name
        newest = table.newest(job, name)
        self._count = newest.number + 1 if newest else 0
        wide = width(self._count)
        self._tail = table.tail(job, name, max(0, self._count - 1) // wide * wide)
        self._source: tuple[int, int] | None = None
        self._began = self._count
        """How many there were when its source began."""
        self._last = newest.time if newest else 0.0

    def add(self, generation: int, rank: int, values: Iterable[Value]) -> None:
        """Values that this rank of this round reports. Those that were here before, as an agent
        sends them again after a reconnection, change nothing.
        """
        source = (generation, rank)
        if self._source is not None and source != self._source:
            late = generation < self._source[0]
            if late or (generation == self._source[0] and rank > self._source[1]):
                return
            self._last = 0.0  # another process, of another clock
            if generation == self._source[0]:
                self._take_back()
        if source != self._source:
            self._source, self._began = source, self._count
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

    def _take_back(self) -> None:
        """A lower rank reports too: what the higher one said in this round does not count."""
        self._table.replace(self._job, self._name, self._began, [])
        wide = width(self._began)
        self._count = self._began
        first = max(0, self._count - 1) // wide * wide
        self._tail = self._table.tail(self._job, self._name, first)

    def _append(self, rows: list[MetricRow]) -> None:
        count = self._count + len(rows)
        wide = width(count)
        if wide == width(self._count):
            base = self._tail
        else:
            base = self._table.rows(self._job, [self._name])
        selected = thinned([*base, *rows], count)
        self._table.replace(self._job, self._name, (base or rows)[0].number, selected)
        self._count = count
        self._tail = [row for row in selected if row.number >= (count - 1) // wide * wide]


def series_views(
    table: SeriesTable, job: JobRow, names: Collection[str], since: float, most: int
) -> list[SeriesView]:
    """The metrics of a job over time, as many of their values as one answer holds.

    Args:
        table: where they are stored.
        job: whose.
        names: which; none: all.
        since: only values reported later, seconds since the epoch.
        most: so many of each at most; 0: all that are kept.
    """
    by_name: dict[str, list[MetricRow]] = {}
    for row in table.rows(job.id, names):
        by_name.setdefault(row.name, []).append(row)
    most = min(most or MAX_POINTS, max(LEAST_SHOWN, MOST_SHOWN // max(1, len(by_name))))
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
