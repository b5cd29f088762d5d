"""A job's metrics over time: numbers in columns, points, and a data frame if pandas is
installed."""

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
    """Value passed to :func:`malletrain.metric`."""
    time: float
    """Time of the report, seconds since the epoch."""
    samples: float
    """Samples that the job had processed by then, all ranks together."""
    nodes: int
    """The job's scale at that time; 0 if not known."""
    step: int | None
    """The script's own step count; None if it gave none."""


@dataclass(frozen=True)
class MetricSeries(Sequence[MetricPoint]):
    """One metric over time, the oldest value first. A long series is thinned out evenly, but keeps
    its first, last, smallest and largest values.
    """

    name: str
    """Name of the metric."""
    values: tuple[float, ...]
    """Reported values."""
    times: tuple[float, ...]
    """Times of the reports, seconds since the epoch."""
    samples: tuple[float, ...]
    """Samples that the job had processed by then, all ranks together."""
    nodes: tuple[int, ...]
    """The job's scale at these times; 0 if not known."""
    steps: tuple[int | None, ...]
    """The script's own step counts; None if it gave none."""
    reported: int
    """Number of values reported in all, including thinned-out ones."""

    @classmethod
    def of(cls, view: SeriesView) -> MetricSeries:
        """Return the series in a view of the daemon."""
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
        """Return a row for each value, with the columns :data:`COLUMNS`."""
        return [
            (name, p.time, p.step, p.samples, p.nodes, p.value)
            for name, series in self.items()
            for p in series
        ]

    def frame(self) -> Any:
        """Return all values as a :class:`pandas.DataFrame`, a row each, in order of time:
        ``metric``, ``time`` (UTC), ``step``, ``samples``, ``nodes``, ``value``.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas

        frame = pandas.DataFrame(self.rows(), columns=COLUMNS)
        frame["time"] = pandas.to_datetime(frame["time"].astype(float), unit="s", utc=True)
        frame["step"] = frame["step"].astype("Int64")
        return frame.sort_values("time", kind="stable", ignore_index=True)


def write_csv(file: Path, metrics: JobMetrics) -> Path:
    """Write all values as CSV, times in seconds since the epoch; return the file."""
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(COLUMNS)
        writer.writerows(metrics.rows())
    return file
