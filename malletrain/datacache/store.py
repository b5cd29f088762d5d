"""The samples of one data set in the memory of one node: a file in shared memory that all processes
of a user on the node use together.

The file has a header, an index with one entry for each sample of the data set, and the packed
samples, one after another. A sample is never moved and never removed, so a process can use it in
place. Its mapping is private: no other process sees what it writes into a sample. Writers hold a
lock of the kernel, which is released when its holder dies. A process that is killed in the middle
of a write leaves an index entry without a sample, or with a wrong check sum; the sample then counts
as absent. A check sum covers the sample's number, its length and its bytes.

Decides what is admitted: every sample while there is memory for it, none after that.
:mod:`malletrain.datacache.reader` decides which samples are offered.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from malletrain.datacache.packing import ALIGN
from malletrain.memory.folder import LOCK_PAUSE_S, SHARED_MEMORY, available
from malletrain.protocol.sizes import shown

_HEADER = struct.Struct("<8sQQQI")
HEADER_BYTES = 4096
_TAIL = struct.Struct("<Q")
_SUMMED = struct.Struct("<QQ")
"""Number and length of a sample, the first bytes of its check sum."""
_TAIL_OFFSET = 64
ENTRY = struct.Struct("<QII")
"""Offset of a sample, its length, its check sum; an offset of 0: absent."""
MAX_SAMPLE_BYTES = 2**32 - 1
"""Maximum size of a packed sample, bytes. A larger one is read from the data set each time."""
_MAGIC = b"MTDATA1\0"
_CHECK_BYTES = 16 << 20
"""Bytes that are written between two checks of the node's free memory."""
LOCK_TRIES = 500
"""Number of tries to get a lock, LOCK_PAUSE_S apart."""
BLOCKED_S = 60.0
"""Time for which nothing is written after the lock could not be taken, seconds."""
_MAX_INDEX_SHARE = 0.25
"""Maximum part of the memory that the index may take."""
SHARED_RESERVE = 0.25
"""Part of ``/dev/shm`` that stores leave free. Batches of loader workers, exchanges between
processes and snapshots are there too, and a process that writes to it when it is full is killed
(SIGBUS).
"""
SUFFIX = ".samples"


class DataCacheRefusalError(ValueError):
    """The data set cannot use this store; the message is for the user."""


class OtherDataSetError(DataCacheRefusalError):
    """The name belongs to a data set of another length."""


class NoMemoryForDataError(DataCacheRefusalError):
    """The node has too little memory; the data set is read without a cache."""


@dataclass(frozen=True)
class DataSetIdentity:
    """What distinguishes one data set from another."""

    name: str
    """Name that its user gives it."""
    length: int
    """Number of its samples."""
    first: int
    """Check sum of its sample 0 as it is packed."""


def file_name(name: str) -> str:
    """Return the file name of the data set ``name``."""
    readable = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:40]
    return f"{readable}-{sha256(name.encode()).hexdigest()[:16]}{SUFFIX}"


def check_sum(sample: int, data: Any) -> int:
    """Return the check sum of a packed sample (CRC-32 of its number, its length and its bytes)."""
    return zlib.crc32(data, zlib.crc32(_SUMMED.pack(sample, len(data))))


def private_data_folder(path: Path) -> Path:
    """Create the folder ``path`` if it is absent, and check that only this user can use it.

    Raises:
        DataCacheRefusalError: it belongs to another user, or others can use it.
        OSError: it cannot be created.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise DataCacheRefusalError(
            f"{path} belongs to another user (uid {status.st_uid}). Ask them to remove it."
        )
    if status.st_mode & 0o077:
        raise DataCacheRefusalError(
            f"Other users can use {path} (mode {status.st_mode & 0o777:o}). Remove it, or make it "
            f"private: chmod 700 {path}"
        )
    return path


class NodeStore:
    """The store of one data set on this node, opened by one process. Create it with :func:`attach`
    or :meth:`open_existing`.

    It is thread-safe. A forked process can continue to use it; a spawned process opens it again.
    """

    def __init__(self, path: Path, file: int, use: int) -> None:
        self.path = path
        self._file, self._use = file, use
        magic, length, size, start, first = _HEADER.unpack(os.pread(file, _HEADER.size, 0))
        if magic != _MAGIC or os.fstat(file).st_size != size:
            raise OSError(f"{path} is no store of samples.")
        self.length: int = length
        """Number of samples of the data set."""
        self.first: int = first
        """Check sum of its sample 0."""
        self.capacity: int = size - start
        """Memory for samples, bytes."""
        self._start: int = start
        self._size: int = size
        """Size of the file, bytes."""
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        self._map = mmap.mmap(file, size, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=prot)
        self._view = memoryview(self._map)
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._checked_at = 0
        self._check_bytes = min(_CHECK_BYTES, size // 64)
        self._refused = False
        """Whether a sample did not fit."""
        self._blocked_until = 0.0
        """Time until which nothing is written, because another process is stopped (monotonic)."""

    @classmethod
    def open_existing(cls, path: Path) -> NodeStore | None:
        """Return the store at ``path``; None if there is none."""
        files: list[int] = []
        try:
            # The second descriptor marks the store as in use. The mapping has a duplicate of the
            # first one, which lives as long as a sample is in use.
            for _ in range(2):
                files.append(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
            if not _take_lock(fcntl.flock, files[1], fcntl.LOCK_SH):
                raise OSError(f"{path} is being removed.")
            status = os.fstat(files[0])
            if status.st_uid != os.geteuid() or status.st_nlink == 0:  # removed meanwhile
                raise OSError(f"{path} cannot be used.")
            return cls(path, *files)
        except (OSError, struct.error):
            for file in files:
                os.close(file)
            return None

    def close(self) -> None:
        """Close it. Samples that are in use stay readable."""
        for file in (self._file, self._use):
            if file >= 0:
                os.close(file)
        self._file = self._use = -1

    def __del__(self) -> None:
        if hasattr(self, "_view"):
            self.close()

    # --- reading ---

    def __contains__(self, sample: int) -> bool:
        return bool(self._entry(sample)[0])

    def find(self, sample: int) -> tuple[memoryview | bytearray, int] | None:
        """Return a packed sample in place, and its check sum; None if it is absent or damaged."""
        offset, length, total = self._entry(sample)
        if not self._start <= offset <= self._size - length:
            return None
        data = self._view[offset : offset + length]
        if check_sum(sample, data) == total:
            return data, total
        # This process may have changed its own copy of the page.
        copy = bytearray(os.pread(self._file, length, offset))
        if len(copy) == length and check_sum(sample, copy) == total:
            return copy, total
        return None

    def get(self, sample: int) -> memoryview | bytearray | None:
        """Return a packed sample in place; None if it is absent or damaged."""
        one = self.find(sample)
        return None if one is None else one[0]

    def _entry(self, sample: int) -> tuple[int, int, int]:
        if not 0 <= sample < self.length:
            return 0, 0, 0
        entry: tuple[int, int, int] = ENTRY.unpack_from(
            self._map, HEADER_BYTES + sample * ENTRY.size
        )
        return entry

    @property
    def size(self) -> int:
        """Memory that is reserved for it, including its index, bytes."""
        return self._size

    @property
    def used(self) -> int:
        """Bytes of samples in it."""
        return max(0, self._tail() - self._start)

    @property
    def full(self) -> bool:
        """Whether no further sample is admitted, because there was no memory for one."""
        return self._refused or self._tail() + ALIGN >= self._size

    def count(self) -> int:
        """Return the number of samples in it."""
        import numpy

        entries = numpy.frombuffer(
            self._view[HEADER_BYTES : HEADER_BYTES + self.length * ENTRY.size], dtype="<u8"
        )
        return int(numpy.count_nonzero(entries[::2]))

    # --- writing ---

    def put(self, sample: int, data: Any, total: int | None = None) -> bool:
        """Keep a packed sample, if it is absent and there is memory for it.

        Args:
            sample: number of the sample.
            data: its packed bytes.
            total: their check sum; None to compute it.

        Returns:
            Whether the store has the sample now. It does not if there is no memory for the sample,
            the sample is larger than :data:`MAX_SAMPLE_BYTES`, or another process is stopped in the
            middle of a write.
        """
        if not 0 <= sample < self.length:
            return False
        if sample in self:
            return True
        if len(data) > MAX_SAMPLE_BYTES:
            return False
        if self.full or time.monotonic() < self._blocked_until:
            return False
        if total is None:
            total = check_sum(sample, data)
        if os.getpid() != self._process:  # a thread of the parent may hold the parent's lock
            self._lock, self._process = threading.Lock(), os.getpid()
        with self._lock:
            try:
                if not _take_lock(fcntl.lockf, self._file, fcntl.LOCK_EX):
                    self._blocked_until = time.monotonic() + BLOCKED_S
                    return False
                try:
                    return self._append(sample, data, total)
                finally:
                    fcntl.lockf(self._file, fcntl.LOCK_UN)
            except OSError:
                self._refused = True  # such as no shared memory left: this file gets no more
                return False

    def _append(self, sample: int, data: Any, total: int) -> bool:
        if sample in self:
            return True
        offset = self._tail()
        end = -(-(offset + len(data)) // ALIGN) * ALIGN
        if end > self._size:
            self._refused = True
            return False
        if end - self._checked_at > self._check_bytes:
            if available() < _CHECK_BYTES or not shared_memory_left(self.path.parent):
                self._refused = True
                return False
            self._checked_at = end
        # A kill between these writes leaves unused space, or a sample with a wrong check sum.
        _write(self._file, _TAIL.pack(end), _TAIL_OFFSET)
        _write(self._file, data, offset)
        _write(
            self._file,
            ENTRY.pack(offset, len(data), total),
            HEADER_BYTES + sample * ENTRY.size,
        )
        return True

    def _tail(self) -> int:
        return int(_TAIL.unpack(os.pread(self._file, _TAIL.size, _TAIL_OFFSET))[0])


_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def attach(folder: Path, data: DataSetIdentity, memory: int) -> NodeStore:
    """Return the store of a data set on this node, which is created if it is absent.

    Args:
        folder: folder of the user's stores on this node.
        data: the data set.
        memory: maximum size of a new store, bytes. An existing one keeps its size.

    Raises:
        NoMemoryForDataError: the node has too little memory.
        OtherDataSetError: the store of that name has a data set of another length.
        OSError: it cannot be created.
    """
    path = folder / file_name(data.name)
    for _ in range(10):
        store = NodeStore.open_existing(path)
        if store is None:
            _create(path, data, memory)
            continue
        if store.length != data.length:
            length = store.length
            store.close()
            raise OtherDataSetError(
                f"The data cache {data.name!r} on this node has a data set of {length} samples, "
                f"but this one has {data.length}. Give it another name."
            )
        return store
    raise OSError(f"{path} cannot be opened: it is removed again and again.")


def _create(path: Path, data: DataSetIdentity, memory: int) -> None:
    start = -(-(HEADER_BYTES + data.length * ENTRY.size) // HEADER_BYTES) * HEADER_BYTES
    size = min(memory, _free_for(path.parent, memory))
    if size < start / _MAX_INDEX_SHARE:
        reason = f" {size_reason(path.parent, memory)}" if size < memory else ""
        raise NoMemoryForDataError(
            f"The data cache {data.name!r} would get {shown(max(0, size))} of this node's memory. "
            f"For {data.length} samples it needs {shown(int(start / _MAX_INDEX_SHARE))} at least."
            f"{reason}"
        )
    file, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        os.ftruncate(file, size)
        os.posix_fallocate(file, 0, start)
        _write(file, _HEADER.pack(_MAGIC, data.length, size, start, data.first), 0)
        _write(file, _TAIL.pack(start), _TAIL_OFFSET)
        try:
            os.link(temporary, path)
        except FileExistsError:  # another process was faster
            pass
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise NoMemoryForDataError(
                f"The shared memory of this node is full; the data cache {data.name!r} cannot be "
                "created."
            ) from error
        raise
    finally:
        os.close(file)
        os.unlink(temporary)


def _free_for(folder: Path, needed: int) -> int:
    """Return the memory for a new store, bytes. Removes stores that no process uses if there is
    less than ``needed``.
    """
    free = _free(folder)
    for path in sorted(folder.glob(f"*{SUFFIX}"), key=_modified):
        if free >= needed:
            break
        if remove_unused(path):
            free = _free(folder)
    return free


def _free(folder: Path) -> int:
    """Return the free memory without what existing stores in ``folder`` may still use, bytes."""
    reserved = 0
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            status = path.lstat()
        except OSError:
            continue
        reserved += max(0, status.st_size - status.st_blocks * 512)
    return min(shared_memory_left(folder), available()) - reserved


def shared_memory_left(folder: Path) -> int:
    """Return how much of its file system stores in ``folder`` may still use, bytes: all free space,
    on ``/dev/shm`` without :data:`SHARED_RESERVE`.
    """
    stats = os.statvfs(folder)
    free = stats.f_bavail * stats.f_frsize
    if _in_shared_memory(folder):
        free -= int(SHARED_RESERVE * stats.f_blocks * stats.f_frsize)
    return max(0, free)


def size_reason(folder: Path, memory: int) -> str:
    """Return why a store in ``folder`` has less than ``memory`` bytes, as a sentence."""
    stats = os.statvfs(folder)
    total = stats.f_blocks * stats.f_frsize
    if _in_shared_memory(folder) and total * (1.0 - SHARED_RESERVE) < memory:
        return (
            f"{SHARED_MEMORY} of this node has {shown(total)}, and a quarter of it stays free for "
            "loader workers, exchanges and snapshots. In a container, make it larger (docker run "
            "--shm-size), or use that of the host (--ipc=host)."
        )
    return "No more was free when its store was created, or another process gave it this size."


def _in_shared_memory(folder: Path) -> bool:
    try:
        return folder.stat().st_dev == SHARED_MEMORY.stat().st_dev
    except OSError:
        return False


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def remove_unused(path: Path) -> bool:
    """Remove the store at ``path`` if no process uses it. Return whether it was removed."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def _take_lock(lock: Callable[[int, int], object], file: int, kind: int) -> bool:
    """Take a lock that others hold for microseconds only. Return False if a stopped process holds
    it.
    """
    for _ in range(LOCK_TRIES):
        try:
            lock(file, kind | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):  # fcntl(2): EAGAIN or EACCES
            time.sleep(LOCK_PAUSE_S)
    return False


def _write(file: int, data: Any, offset: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
