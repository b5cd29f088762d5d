"""Sends a job's output to the daemon: files in the run directory, sent in chunks and deleted when
the daemon has them.

Decides the send rate and the cleanup. Each log has at most one unacknowledged chunk, of at most
CHUNK_BYTES. It is sent again after a reconnection or a timeout. A log that lags behind or is
complete is sent as fast as the daemon acknowledges it, any other log four times a second. While a
log grows, its acknowledged part is freed (by punching holes), so that a long run does not fill the
node's disk. The end of each log stays readable for the report of a failure.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from malletrain.protocol.failures import without_noise
from malletrain.protocol.messages import LogAck, LogChunk, LogEnd, LogsShipped, Message

CHUNK_BYTES = 64 * 1024
SEND_INTERVAL_S = 0.25
_ACK_TIMEOUT_S = 5.0
_KEPT_TAIL_BYTES = 256 * 1024
"""Number of bytes at the end of the acknowledged part that are not freed."""
_PUNCH_BYTES = 256 * 1024
"""Granularity in which the acknowledged part is freed, bytes."""
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2  # fallocate(2)
_TAIL_SEARCH_BYTES = 32 * 1024
"""Number of bytes at the end of a log that are searched for its last lines. Noise can follow these
lines.
"""
TAIL_LINES = 20
TAIL_BYTES = 4096


def tail(path: Path, lines: int = TAIL_LINES, limit: int = TAIL_BYTES) -> str:
    """Return the last lines of a file as text, without known noise; empty if there are none.

    Args:
        path: the file.
        lines: maximum number of lines.
        limit: maximum number of bytes.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_SEARCH_BYTES))
            data = file.read(_TAIL_SEARCH_BYTES)
    except OSError:
        return ""
    if size > _TAIL_SEARCH_BYTES:
        data = data.partition(b"\n")[2] or data
    text = without_noise(data.decode("utf-8", "replace")).encode()
    if len(text) > limit:
        cut = text[-limit:]
        text = cut.partition(b"\n")[2] or cut
    return "\n".join(text.decode("utf-8", "replace").splitlines()[-lines:])


def _punch_hole(fd: int, start: int, end: int) -> None:
    """Free the blocks of [start, end) of a file, whose size stays. Does nothing on file systems
    without hole punching.
    """
    libc = ctypes.CDLL(None)
    mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
    libc.fallocate(fd, mode, ctypes.c_long(start), ctypes.c_long(end - start))


@dataclass
class ForwardedLog:
    """A log that is being forwarded."""

    job: str
    """Id of the job."""
    generation: int
    """Number of the round; 0 for a log that belongs to no round."""
    stream: str
    """Name of the log, such as ``rank0`` or ``launcher``."""
    path: Path
    """The file."""
    acked_bytes: int = 0
    """Number of bytes that the daemon has stored, or does not store because of its limit."""
    complete: bool = False
    """Whether the log is complete."""
    sent_at: float | None = None
    """Time at which the unacknowledged chunk was sent; None if there is none."""
    sent_end: int = 0
    """End offset of that chunk."""
    _freed_bytes: int = 0

    def size(self) -> int:
        """Return the number of bytes written so far."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def chunk(self, node: str) -> LogChunk | None:
        """Return the next chunk; None if there is none. Raises OSError if the file is there and
        cannot be read now, such as without free file descriptors.
        """
        try:
            with open(self.path, "rb") as file:
                file.seek(self.acked_bytes)
                data = file.read(CHUNK_BYTES)
        except FileNotFoundError:
            return None
        if not data:
            return None
        offset = self.acked_bytes
        size = max(self.size(), offset + len(data))
        return LogChunk(self.job, self.generation, self.stream, node, offset, data, size)

    def end_message(self, node: str) -> LogEnd:
        """Return the message that ends this log."""
        return LogEnd(self.job, self.generation, self.stream, node, self.size())

    def free_acked(self) -> None:
        """Free the disk blocks of the acknowledged bytes, in large pieces."""
        end = (self.acked_bytes - _KEPT_TAIL_BYTES) // _PUNCH_BYTES * _PUNCH_BYTES
        if end > self._freed_bytes:
            try:
                fd = os.open(self.path, os.O_RDWR)
            except OSError:
                return
            try:
                _punch_hole(fd, self._freed_bytes, end)
            finally:
                os.close(fd)
            self._freed_bytes = end


@dataclass
class LogForwarder:
    """The logs of this node that the daemon does not have in full."""

    node: str
    """Name of the node."""
    send: Callable[[Message], bool]
    """Sends a message to the daemon. Returns False if the daemon is away."""
    limit_bytes: int = 0
    """Maximum size of a log on the daemon, bytes; 0 for no limit."""
    files: dict[tuple[str, int, str], ForwardedLog] = field(default_factory=dict)
    """The logs by (job, generation, stream)."""

    def add(self, job: str, generation: int, stream: str, path: Path) -> None:
        """Forward the log at ``path``, which need not exist yet. It replaces a log with the same
        key, because a restarted launcher starts a new log.

        Args:
            job: id of the job.
            generation: number of the round; 0 for a log that belongs to no round.
            stream: name of the log.
            path: the file.
        """
        forwarded_log = self.files.get((job, generation, stream))
        if forwarded_log is not None and forwarded_log.path == path:
            forwarded_log.complete = False
        else:
            self.files[job, generation, stream] = ForwardedLog(job, generation, stream, path)

    def mark_complete(self, job: str, before_generation: int | None = None) -> None:
        """Mark the logs of the job's workers in rounds before ``before_generation`` as complete;
        None for all logs of the job.
        """
        for file in self.files.values():
            if file.job == job and (
                before_generation is None
                or (
                    file.generation < before_generation
                    and file.stream not in ("launcher", "service")
                )
            ):
                file.complete = True

    def send_due(self) -> None:
        """Send the chunks that are due, and delete the logs that the daemon has in full."""
        for file in list(self.files.values()):
            self._forward(file)

    def _forward(self, file: ForwardedLog) -> None:
        now = time.monotonic()
        if file.sent_at is not None and now - file.sent_at < _ACK_TIMEOUT_S:
            return
        at_limit = 0 < self.limit_bytes <= file.acked_bytes
        if at_limit:
            file.acked_bytes = max(file.acked_bytes, file.size())  # the daemon stores no more of it
            file.free_acked()
        try:
            chunk = None if at_limit else file.chunk(self.node)
        except OSError:  # it is not dropped: the daemon does not have it
            return
        if chunk is not None:
            file.sent_end = chunk.offset + len(chunk.data)
            file.sent_at = now if self.send(chunk) else None
        elif file.complete:
            if at_limit:
                self.send(file.end_message(self.node))
            self._drop(file)

    def _drop(self, file: ForwardedLog) -> None:
        file.path.unlink(missing_ok=True)
        del self.files[file.job, file.generation, file.stream]
        if file.job not in self.unfinished_jobs():
            self.send(LogsShipped(file.job))

    def unfinished_jobs(self) -> tuple[str, ...]:
        """Return the jobs with logs that the daemon may not have in full."""
        return tuple(sorted({file.job for file in self.files.values()}))

    def abandon(self) -> None:
        """Stop forwarding because no time is left: send the daemon the length of each remaining
        log, and delete the log.
        """
        for file in list(self.files.values()):
            self.send(file.end_message(self.node))
            self._drop(file)

    def acknowledged(self, ack: LogAck) -> None:
        """Handle an acknowledgement: the daemon has all bytes before ``ack.offset``."""
        file = self.files.get((ack.job, ack.generation, ack.stream))
        if file is None or ack.offset > file.sent_end:  # it is for an earlier log with this key
            return
        # The offset decreases if the daemon's copy was truncated.
        file.acked_bytes, file.sent_at = min(ack.offset, file.size()), None
        file.free_acked()
        if file.complete or file.size() - file.acked_bytes >= CHUNK_BYTES:
            self._forward(file)

    def reconnected(self) -> None:
        """Send unacknowledged chunks again after a reconnection, because they may be lost."""
        for file in self.files.values():
            file.sent_at = None
