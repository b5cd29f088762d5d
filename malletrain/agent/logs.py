"""Sends a job's output to the daemon: files in the run directory, sent in pieces and deleted once
the daemon has them.

Decides rate and cleanup: one unacknowledged piece per log, at most CHUNK_BYTES each, sent again
after a reconnection or when no answer comes. A log that lags behind, or has ended, is sent as fast
as the daemon takes it; one that grows slowly, four times a second. Acknowledged parts are freed
while the log still grows (punched holes), so that a long run does not fill the node's disk. The end
of each log stays readable for the report of a failure.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from malletrain.protocol.last_words import without_noise
from malletrain.protocol.messages import LogAck, LogChunk, LogEnd, LogsShipped, Message

CHUNK_BYTES = 64 * 1024
SEND_INTERVAL_S = 0.25
_ANSWER_S = 5.0
_KEEP_BYTES = 256 * 1024
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2  # fallocate(2)
_LOOK_BYTES = 32 * 1024
"""Bytes of a log's end in which its last lines are looked for: noise may lie behind them."""
TAIL_LINES = 20
TAIL_BYTES = 4096


def tail(path: Path, lines: int = TAIL_LINES, limit: int = TAIL_BYTES) -> str:
    """The last lines of a file as text, at most ``limit`` bytes, without known noise; empty when
    there are none.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOOK_BYTES))
            data = file.read(_LOOK_BYTES)
    except OSError:
        return ""
    if size > _LOOK_BYTES:
        data = data.partition(b"\n")[2] or data
    text = without_noise(data.decode("utf-8", "replace")).encode()
    if len(text) > limit:
        cut = text[-limit:]
        text = cut.partition(b"\n")[2] or cut
    return "\n".join(text.decode("utf-8", "replace").splitlines()[-lines:])


def _give_back(fd: int, start: int, end: int) -> None:
    """Free the blocks of [start, end) of a file; its size stays. File systems that cannot do that
    keep them.
    """
    libc = ctypes.CDLL(None)
    mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
    libc.fallocate(fd, mode, ctypes.c_long(start), ctypes.c_long(end - start))


@dataclass
class LogFile:
    """One log on its way."""

    job: str
    generation: int
    stream: str
    path: Path
    acked: int = 0
    """Bytes that are on the daemon's disk, or that it does not want."""
    over: bool = False
    """Nothing will be added any more."""
    sent_at: float | None = None
    """When the piece was sent that is not acknowledged; None: there is no such piece."""
    sent: int = 0
    """Where that piece ended."""
    _freed: int = 0

    def size(self) -> int:
        """Bytes written so far."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def chunk(self, node: str) -> LogChunk | None:
        """The next piece, if there is one."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.acked)
                data = file.read(CHUNK_BYTES)
        except OSError:
            return None
        if not data:
            return None
        size = max(self.size(), self.acked + len(data))
        return LogChunk(self.job, self.generation, self.stream, node, self.acked, data, size)

    def end(self, node: str) -> LogEnd:
        """That no more of it is sent."""
        return LogEnd(self.job, self.generation, self.stream, node, self.size())

    def free(self) -> None:
        """Give back what was acknowledged, in large steps."""
        end = (self.acked - _KEEP_BYTES) // _KEEP_BYTES * _KEEP_BYTES
        if end > self._freed:
            try:
                fd = os.open(self.path, os.O_RDWR)
            except OSError:
                return
            try:
                _give_back(fd, self._freed, end)
            finally:
                os.close(fd)
            self._freed = end


@dataclass
class LogForwarder:
    """All logs of this node that the daemon does not have completely. ``limit_bytes``: how much of
    one log it takes, 0 for all.
    """

    node: str
    send: Callable[[Message], bool]
    limit_bytes: int = 0
    files: dict[tuple[str, int, str], LogFile] = field(default_factory=dict)

    def add(self, job: str, generation: int, stream: str, path: Path) -> None:
        """Forward the log that is or will be written at ``path``, in the place of one of the same
        name: a launcher that is started again begins its log anew.
        """
        log_file = self.files.get((job, generation, stream))
        if log_file is not None and log_file.path == path:
            log_file.over = False
        else:
            self.files[job, generation, stream] = LogFile(job, generation, stream, path)

    def close(self, job: str, before: int | None = None) -> None:
        """The job's workers of rounds before ``before`` are gone (None: everything of the job):
        nothing is added to their logs.
        """
        for file in self.files.values():
            if file.job == job and (
                before is None
                or (file.generation < before and file.stream not in ("launcher", "service"))
            ):
                file.over = True

    def step(self) -> None:
        """Send what is due and delete what is done."""
        for file in list(self.files.values()):
            self._forward(file)

    def _forward(self, file: LogFile) -> None:
        now = time.monotonic()
        if file.sent_at is not None and now - file.sent_at < _ANSWER_S:
            return
        full = 0 < self.limit_bytes <= file.acked
        if full:
            file.acked = max(file.acked, file.size())  # the daemon takes no more of it
            file.free()
        chunk = None if full else file.chunk(self.node)
        if chunk is not None:
            file.sent = chunk.offset + len(chunk.data)
            file.sent_at = now if self.send(chunk) else None
        elif file.over:
            if full:
                self.send(file.end(self.node))
            self._drop(file)

    def _drop(self, file: LogFile) -> None:
        file.path.unlink(missing_ok=True)
        del self.files[file.job, file.generation, file.stream]
        if file.job not in self.jobs():
            self.send(LogsShipped(file.job))

    def jobs(self) -> tuple[str, ...]:
        """The jobs of whose logs the daemon may not have everything."""
        return tuple(sorted({file.job for file in self.files.values()}))

    def abandon(self) -> None:
        """There is no time left: tell the daemon how long each log is that it does not have."""
        for file in list(self.files.values()):
            self.send(file.end(self.node))
            self._drop(file)

    def acknowledged(self, ack: LogAck) -> None:
        """The daemon has everything below ``ack.offset``."""
        file = self.files.get((ack.job, ack.generation, ack.stream))
        if file is None or ack.offset > file.sent:  # of another log that had this name
            return
        # The offset is lower than before when the daemon's copy was cut.
        file.acked, file.sent_at = min(ack.offset, file.size()), None
        file.free()
        if file.over or file.size() - file.acked >= CHUNK_BYTES:
            self._forward(file)

    def reconnected(self) -> None:
        """What was sent and not acknowledged may be lost: send it again."""
        for file in self.files.values():
            file.sent_at = None
