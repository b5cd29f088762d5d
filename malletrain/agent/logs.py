"""The way of a job's output to the daemon: files in the run directory, sent piece by piece, deleted
once the daemon has them.

Decides pace and clean-up: one unacknowledged piece per log, at most CHUNK_BYTES each, sent again
after a reconnection or when no answer comes. What the daemon has is given back to the file system
while the log still grows (punched holes), so that a long run does not fill the node's disk. The end
of every log stays readable for the report of a failure.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from malletrain.protocol.messages import LogAck, LogChunk

CHUNK_BYTES = 64 * 1024
SEND_INTERVAL_S = 0.25
_ANSWER_S = 5.0
_KEEP_BYTES = 256 * 1024
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2  # fallocate(2)
TAIL_LINES = 20
TAIL_BYTES = 4096


def tail(path: Path, lines: int = TAIL_LINES, limit: int = TAIL_BYTES) -> str:
    """The last lines of a file as text, at most ``limit`` bytes; empty when there is none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            data = file.read(limit)
    except OSError:
        return ""
    if size > limit:
        data = data.partition(b"\n")[2] or data
    return "\n".join(data.decode("utf-8", "replace").splitlines()[-lines:])


def _give_back(fd: int, start: int, end: int) -> None:
    """Free the blocks of [start, end) of a file; its size stays. File systems that cannot do that
    keep them.
    """
    libc = ctypes.CDLL(None)
    mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
    libc.fallocate(fd, mode, ctypes.c_long(start), ctypes.c_long(end - start))


@dataclass
class LogFile:
    """One log on its way. ``acked``: bytes that are on the daemon's disk. ``over``: nothing will be
    added any more.
    """

    job: str
    generation: int
    stream: str
    path: Path
    acked: int = 0
    over: bool = False
    sent_at: float | None = None
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
        return (
            LogChunk(self.job, self.generation, self.stream, node, self.acked, data)
            if data
            else None
        )

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
    send: Callable[[LogChunk], bool]
    limit_bytes: int = 0
    files: dict[tuple[str, int, str], LogFile] = field(default_factory=dict)

    def add(self, job: str, generation: int, stream: str, path: Path) -> None:
        """Forward the log that is or will be written at ``path``."""
        self.files.setdefault((job, generation, stream), LogFile(job, generation, stream, path))

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
        now = time.monotonic()
        for key, file in list(self.files.items()):
            if file.sent_at is not None and now - file.sent_at < _ANSWER_S:
                continue
            full = 0 < self.limit_bytes <= file.acked
            if full:
                file.acked = max(file.acked, file.size())  # the daemon takes no more of it
                file.free()
            chunk = None if full else file.chunk(self.node)
            if chunk is not None:
                file.sent_at = now if self.send(chunk) else None
            elif file.over:
                file.path.unlink(missing_ok=True)
                del self.files[key]

    def acknowledged(self, ack: LogAck) -> None:
        """The daemon has everything below ``ack.offset``."""
        file = self.files.get((ack.job, ack.generation, ack.stream))
        if file is not None:  # the offset is lower than before when the daemon's copy was cut
            file.acked, file.sent_at = min(ack.offset, file.size()), None
            file.free()

    def reconnected(self) -> None:
        """What was sent and not acknowledged may be lost: send it again."""
        for file in self.files.values():
            file.sent_at = None

    def all_sent(self) -> bool:
        """Whether the daemon has all there is."""
        return all(
            0 < self.limit_bytes <= f.acked or f.acked >= f.size() for f in self.files.values()
        )
