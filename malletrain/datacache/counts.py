"""Counts of a cache's reads, shared by the processes of one rank: the process itself, its prefetch
thread and its loader workers.

Each process has a slot in a file in shared memory. A later worker with the same number continues
the slot, and may begin while the earlier one is still ending, so a slot is locked while a count is
added.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import threading
from dataclasses import dataclass, fields
from operator import add
from pathlib import Path

SLOTS = 64
"""Number of processes that are counted separately; later ones share the last slot."""


@dataclass(frozen=True)
class ReadCounts:
    """Reads of samples, by where they were found."""

    node_hits: int = 0
    """Samples found in this node's memory."""
    peer_hits: int = 0
    """Samples fetched from other nodes."""
    source_reads: int = 0
    """Samples read from the data set."""
    hit_bytes: int = 0
    """Bytes of the samples found in the memory of a node, as they are packed."""
    source_bytes: int = 0
    """Bytes of the samples read from the data set, as they are packed."""
    unpacked: int = 0
    """Samples read from the data set that cannot be packed."""
    source_us: int = 0
    """Time in which the data set was read, microseconds; processes are added up."""

    def __add__(self, other: ReadCounts) -> ReadCounts:
        return ReadCounts(*map(add, self.values, other.values))

    @property
    def values(self) -> tuple[int, ...]:
        """The counts in the order of the fields."""
        return tuple(map(self.__getattribute__, COUNT_NAMES))

    @property
    def reads(self) -> int:
        """Number of samples read."""
        return self.node_hits + self.peer_hits + self.source_reads

    @property
    def hit_ratio(self) -> float:
        """Share of the reads that did not go to the data set; 0 without reads."""
        return (self.node_hits + self.peer_hits) / self.reads if self.reads else 0.0


COUNT_NAMES = tuple(field.name for field in fields(ReadCounts))
_SLOT_BYTES = 64
_PREFIX = "counts-"
_FIELDS = struct.Struct(f"<{len(COUNT_NAMES)}Q")
_PADDED = struct.Struct(f"<{len(COUNT_NAMES)}Q{_SLOT_BYTES - _FIELDS.size}x")


def _remove_dead(folder: Path) -> None:
    """Remove the files of processes that were killed."""
    for path in folder.glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not os.path.exists(f"/proc/{pid}"):
            path.unlink(missing_ok=True)


class SharedCounts:
    """The counts of one rank. ``folder``: folder in shared memory for their file. If it is full,
    the reads of processes that are spawned are not counted.
    """

    def __init__(self, folder: Path) -> None:
        _remove_dead(folder)
        self._owner, size = os.getpid(), SLOTS * _SLOT_BYTES
        prefix = f"{_PREFIX}{self._owner}-"
        try:
            self._file, name = tempfile.mkstemp(dir=folder, prefix=prefix)
            self.path = Path(name)
            # Without this reservation, a write into the map would kill this process (SIGBUS) when
            # the file system is full.
            os.posix_fallocate(self._file, 0, size)
            self._map = mmap.mmap(self._file, size)
        except OSError:
            self._drop_file(folder / f"{prefix}none")
        self._use_lock_of_this_process()

    def _drop_file(self, path: Path) -> None:
        """Count in memory that forked processes share. ``path``: a path without a file."""
        file = getattr(self, "_file", -1)
        if file >= 0:
            os.close(file)
            self.path.unlink(missing_ok=True)
        self.path, self._file = path, -1
        self._map = mmap.mmap(-1, SLOTS * _SLOT_BYTES)

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.path, self._owner = state["path"], 0
        try:
            self._file = os.open(self.path, os.O_RDWR)
            self._map = mmap.mmap(self._file, SLOTS * _SLOT_BYTES)
        except OSError:  # removed: the reads of this process are not counted
            self._file, self._map = -1, mmap.mmap(-1, SLOTS * _SLOT_BYTES)
        self._use_lock_of_this_process()

    def _use_lock_of_this_process(self) -> None:
        # The lock of the parent may have been held by another thread when it forked.
        self._pid, self._threads = os.getpid(), threading.Lock()

    def add(self, slot: int, counts: ReadCounts) -> None:
        """Add ``counts`` to a slot. ``slot``: number of the process, from 0."""
        if self._pid != os.getpid():
            self._use_lock_of_this_process()
        offset = min(slot, SLOTS - 1) * _SLOT_BYTES
        with self._threads:
            if self._file >= 0:  # the kernel's locks are those of a process, not of a thread
                fcntl.lockf(self._file, fcntl.LOCK_EX, _SLOT_BYTES, offset)
            try:
                old = ReadCounts(*_FIELDS.unpack_from(self._map, offset))
                _FIELDS.pack_into(self._map, offset, *(old + counts).values)
            finally:
                if self._file >= 0:
                    fcntl.lockf(self._file, fcntl.LOCK_UN, _SLOT_BYTES, offset)

    def total(self) -> ReadCounts:
        """Return the sum over all processes."""
        return ReadCounts(*map(sum, zip(*_PADDED.iter_unpack(self._map), strict=True)))

    def source_readers(self) -> int:
        """Return the number of processes that have read from the data set."""
        column = COUNT_NAMES.index("source_reads")
        return sum(counts[column] > 0 for counts in _PADDED.iter_unpack(self._map))

    def close(self) -> None:
        """Remove the file, in the process that created it."""
        if self._owner == os.getpid():
            self.path.unlink(missing_ok=True)
            self._owner = 0

    def __del__(self) -> None:
        if hasattr(self, "_owner"):
            self.close()
            if self._file >= 0:
                os.close(self._file)
