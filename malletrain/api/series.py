"""A job's metrics over time: numbers in columns, points, a data frame where pandas is there."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from malletrain.protocol.views import SeriesView

if TYPE_CHECKING:
    from collections.abc import Iterable


COLUMNS = ["metric", "time", "step", "samples", "nodes", "value"]


class MetricPoint(NamedTuple):
    """One value of a metric."""

    value: float
    """What :func:`malletrain.metric` was told."""
    time: float
    """When, in seconds since the epoch."""
    samples: float
    """What the job had processed by then, all ranks together."""
    nodes: int
    """The job's scale then; 0 where it is not known."""
    step: int | None
    """The script's own count, where it gave one."""


@dataclass(frozen=True)
class MetricSeries(Sequence[MetricPoint]):
    """One metric over time, the oldest value first. A long one is thinned out evenly; its first,
    last, smallest and largest values are always there.
    """

    name: str
    """Of the metric."""
    values: tuple[float, ...]
    """What the script reported."""
    times: tuple[float, ...]
    """When, in seconds since the epoch."""
    samples: tuple[float, ...]
    """What the job had processed by then."""
    nodes: tuple[int, ...]
    """The job's scale then."""
    steps: tuple[int | None, ...]
    """The script's own counts."""
    reported: int
    """How many values were reported in all, those thinned out too."""

    @classmethod
    def of(cls, view: SeriesView) -> MetricSeries:
        """As the daemon tells it."""
        return cls(
            view.name, view.values, view.times, view.samples, view.nodes, view.steps, view.count
        )

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> MetricPoint: ...
    @overload
    def __getitem__(self, index: slice) -> list[MetricPoint]: ...
    def __getitem__(self, index: int | slice) -> MetricPoint | list[MetricPoint]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return MetricPoint(
            self.values[index],
            self.times[index],
            self.samples[index],
            self.nodes[index],
            self.steps[index],
        )


class JobMetrics(Mapping[str, MetricSeries]):
    """The metrics of a job by name."""

    def __init__(self, series: Iterable[SeriesView]) -> None:
        self._series = {view.name: MetricSeries.of(view) for view in series}

    def __getitem__(self, name: str) -> MetricSeries:
        return self._series[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._series)

    def __len__(self) -> int:
        return len(self._series)

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}: {len(each)} values" for name, each in self.items())
        return f"<JobMetrics {inside or 'none yet'}>"

    def rows(self) -> list[tuple[str, float, int | None, float, int, float]]:
        """A row for each value: :data:`COLUMNS`."""
        return [
            (name, p.time, p.step, p.samples, p.nodes, p.value)
            for name, series in self.items()
            for p in series
        ]

    def frame(self) -> Any:
        """All values as a :class:`pandas.DataFrame`, a row each, in order of time: ``metric``,
        ``time`` (UTC), ``step``, ``samples``, ``nodes``, ``value``.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas

        made = pandas.DataFrame(self.rows(), columns=COLUMNS)
        made["time"] = pandas.to_datetime(made["time"].astype(float), unit="s", utc=True)
        made["step"] = made["step"].astype("Int64")
        return made.sort_values("time", kind="stable", ignore_index=True)


def write_csv(file: Path, metrics: JobMetrics) -> Path:
    """Write all values as CSV, times in seconds since the epoch; returns the file."""
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(COLUMNS)
        writer.writerows(metrics.rows())
    return file
