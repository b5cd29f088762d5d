"""Writes metrics as an event file of TensorBoard. Does not need TensorBoard.

A file is a sequence of records, each a length, its checksum, an ``Event`` message of protocol
buffers and its checksum (tensorflow/core/lib/io/record_writer.h, core/util/event.proto). Only the
fields that scalars need are written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from malletrain.api.series import MetricSeries
from malletrain.protocol.views import JobDetail

VERSION = b"brain.Event:2"
NODES = "malletrain/nodes"
"""TensorBoard tag of the job's scale."""
_POLYNOMIAL = 0x82F63B78


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
