"""A job's metrics over time: numbers in columns, points, a data frame if pandas is installed, and
an event file of TensorBoard.

TensorBoard is not needed. Its file is a sequence of records, each a length, its checksum, an
``Event`` message of protocol buffers and its checksum (tensorflow/core/lib/io/record_writer.h,
core/util/event.proto). Only the fields that scalars need are written.
"""

from __future__ import annotations

import csv
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from malletrain.protocol.views import JobDetail, SeriesView

if TYPE_CHECKING:
    from collections.abc import Iterable


COLUMNS = ["metric", "time", "step", "samples", "nodes", "value"]
VERSION = b"brain.Event:2"
NODES = "malletrain/nodes"
"""TensorBoard tag of the job's scale."""
_POLYNOMIAL = 0x82F63B78


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


def _table() -> list[int]:
    values = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        values.append(byte)
    return values


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C checksum (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def write_events(folder: Path, detail: JobDetail, series: Iterable[MetricSeries]) -> Path:
    """Write a run of this job, and replace an earlier one. Return the file. The step of a value is
    the script's own step count, else the number of samples processed by then.

    Args:
        folder: folder of the runs.
        detail: the job.
        series: its metrics.
    """
    job = detail.job
    run = folder / f"{job.name}-{job.id}"
    run.mkdir(parents=True, exist_ok=True)
    file = run / f"events.out.tfevents.{job.submitted:.0f}.{job.id}"
    file.write_bytes(b"".join(records(detail, series)))
    return file


def records(detail: JobDetail, series: Iterable[MetricSeries]) -> Iterator[bytes]:
    """Yield the records of a job's event file: its metrics, and its scale at the time of each
    value.
    """
    yield _record(_event(detail.job.submitted, 0, b"\x1a" + _sized(VERSION)))
    scale_at: dict[float, tuple[int, float]] = {}
    for each in series:
        for point in each:
            step = round(point.samples) if point.step is None else point.step
            yield _record(_event(point.time, step, _scalar(each.name, point.value)))
            scale_at[point.time] = (round(point.samples), float(point.nodes))
    for time, (samples, nodes) in sorted(scale_at.items()):
        yield _record(_event(time, samples, _scalar(NODES, nodes)))


def _record(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return head + _masked(head) + data + _masked(data)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _event(time: float, step: int, what: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", time) + b"\x10" + _varint(step) + what


def _scalar(tag: str, value: float) -> bytes:
    """Return a summary of one scalar."""
    inner = b"\x0a" + _sized(tag.encode()) + b"\x15" + struct.pack("<f", _narrow(value))
    return b"\x2a" + _sized(b"\x0a" + _sized(inner))


def _narrow(value: float) -> float:
    """Return ``value``, or infinity if it is too large for single precision."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return value


def _sized(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _varint(number: int) -> bytes:
    values = bytearray()
    while number > 0x7F:
        values.append(number & 0x7F | 0x80)
        number >>= 7
    values.append(number)
    return bytes(values)
