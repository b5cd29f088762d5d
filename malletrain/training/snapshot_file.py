"""Snapshot files: writes them so that a good one is always on disk, and detects damaged ones when
it reads them.

Decides how bytes reach the disk (temporary file, flush, fsync, atomic rename, fsync of the folder),
how many earlier snapshots are kept, and whether a file is complete.
:mod:`malletrain.training.snapshot` decides when a snapshot is taken and what it contains.

A snapshot is an ordinary ``torch.save`` file: a zip archive whose records have CRC-32 check sums.
They are checked here, because torch does not check them and would load flipped bits as weights. The
shards of a snapshot have check sums by block (:class:`BlockSums`), so that a part of a file can be
read and checked without the rest; no byte of a block whose check sum is wrong is returned.
"""

from __future__ import annotations

import errno
import glob
import os
import pickle
import socket
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import IO, Any, NamedTuple

from malletrain.protocol.fault_points import FaultPoint, reached

FORMAT = 1
"""Format of a snapshot in one file."""
SHARDED_FORMAT = 2
"""Format of a snapshot whose file names a folder of shards
(:mod:`malletrain.training.shard_files`).
"""

_COPY_BYTES = 4 << 20
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES)
"""Errors of a file system that does not support hard links."""
MIN_BLOCK_BYTES = 4096
"""Minimum block size, bytes: a page, because disks and file systems read whole pages."""
MAX_BLOCKS = 1 << 14
"""Maximum number of blocks of a file; their check sums take 64 kB."""
_PIECE = 4 << 20


class SnapshotError(RuntimeError):
    """A snapshot cannot be used; the message names its path."""


class ForeignSnapshotError(SnapshotError):
    """Another run's snapshot is at this path, so no snapshot of this run would be kept."""


class DamagedSnapshotError(SnapshotError):
    """A snapshot is not what was written; the previous one may be good."""


def _marker(path: str) -> str:
    return f"{path}.open-epoch"


def mark_open_epoch(path: str, identity: str) -> None:
    """Record that the snapshot ``identity``, about to be written at ``path``, is taken in the code
    after the steps of an epoch. No run resumes from it until :func:`close_epoch` is called.

    Raises:
        OSError: the marker file cannot be written.
    """
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(_marker(path), "a") as file:
        file.write(identity + "\n")
        file.flush()
        os.fsync(file.fileno())


def close_epoch(path: str) -> None:
    """Let runs resume from the snapshot at ``path``: the code after the steps of the epoch has
    run.
    """
    try:
        os.unlink(_marker(path))
    except OSError:  # absent; or it stays, and the epoch is repeated from the previous snapshot
        pass


def in_open_epoch(path: str) -> frozenset[str]:
    """Return the ids of the snapshots at ``path`` that were taken in the code after the steps of an
    epoch, if that code has not run to its end. They may lack the scheduler's step.
    """
    try:
        with open(_marker(path)) as file:
            return frozenset(file.read().split())
    except (OSError, UnicodeDecodeError):
        return frozenset()


def resumable(path: str) -> str:
    """Return the path of the newest snapshot at ``path`` from which a run can resume."""
    open_epoch_ids = in_open_epoch(path)
    newest = peek(path) if open_epoch_ids else None
    return previous(path, 1) if newest is not None and newest.get("id") in open_epoch_ids else path


def previous(path: str, number: int) -> str:
    """Return the path of the ``number``-th earlier snapshot: ``path.prev``, ``path.prev2``, …"""
    return f"{path}.prev" + (str(number) if number > 1 else "")


def candidates(path: str, keep: int) -> list[str]:
    """Return the paths of the snapshots on disk, newest first."""
    return [
        name
        for name in (path, *(previous(path, number) for number in range(1, keep + 1)))
        if os.path.exists(name)
    ]


class _Writer:
    """A file for torch.save that stores the first OSError, because torch hides it behind an
    internal error of its zip writer.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None
        self.bytes = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if self.error is None:
            try:
                self._file.write(data)
                self.bytes += size
            except OSError as error:
                self.error = error
        return size

    def flush(self) -> None:
        if self.error is None:
            try:
                self._file.flush()
            except OSError as error:
                self.error = error


def write(
    path: str,
    payload: dict[str, Any],
    keep: int,
    keep_newest: bool = True,
    overtaken: Callable[[], None] | None = None,
) -> int:
    """Write ``payload`` as the newest snapshot at ``path``.

    If it is interrupted (full disk, SIGKILL, power failure), the newest or the previous snapshot is
    complete.

    Args:
        path: path of the newest snapshot.
        payload: its content.
        keep: number of earlier snapshots to keep.
        keep_newest: False replaces the file at ``path``, which is known to be damaged, and leaves
            the earlier snapshots unchanged.
        overtaken: for the first snapshot at ``path``: called if another process has written one
            there in the meantime. It raises to keep that one.

    Returns:
        The size of the snapshot, bytes.

    Raises:
        OSError: the disk's error. The snapshots on disk are unchanged and the temporary file is
            removed.
    """
    return _write(path, keep, keep_newest, overtaken, lambda file: write_to(file, payload))


def write_copy(
    path: str,
    source: IO[bytes],
    keep: int,
    keep_newest: bool = True,
    overtaken: Callable[[], None] | None = None,
) -> int:
    """Write the snapshot that an open file contains.

    Args:
        path: path of the newest snapshot.
        source: file with the content.
        keep, keep_newest, overtaken: as for :func:`write`.

    Returns:
        The size of the snapshot, bytes.

    Raises:
        OSError: as for :func:`write`.
    """

    def copy(file: IO[bytes]) -> int:
        size = 0
        while piece := source.read(_COPY_BYTES):
            file.write(piece)
            size += len(piece)
        return size

    return _write(path, keep, keep_newest, overtaken, copy)


def write_to(file: IO[bytes], payload: dict[str, Any]) -> int:
    """Write ``payload`` to ``file``. Return the number of bytes; raises OSError."""
    writer = _Writer(file)
    _torch_save(payload, writer)
    if writer.error is not None:
        raise writer.error
    return writer.bytes


def _write(
    path: str,
    keep: int,
    keep_newest: bool,
    overtaken: Callable[[], None] | None,
    fill: Callable[[IO[bytes]], int],
) -> int:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    temporary = f"{path}.tmp-{socket.gethostname()}-{os.getpid()}"
    try:
        # Other users can read but not write it: restoring trusts a file that only its owner can
        # have written.
        fd = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        with open(fd, "wb") as file:
            size = fill(file)
            file.flush()
            os.fsync(fd)
        reached(FaultPoint.WORKER_WRITTEN)
        if overtaken is None or not _published(temporary, path):
            if overtaken is not None:
                overtaken()
            for number in range(keep if keep_newest else 0, 0, -1):
                _keep(path, number)
            os.replace(temporary, path)
    except BaseException:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise
    reached(FaultPoint.WORKER_KEPT)
    sync_folder(os.path.dirname(path))
    return size


def _published(temporary: str, path: str) -> bool:
    """Link the first snapshot to its path. Return False if there is one already, or if the file
    system has no hard links (two runs may then overwrite each other).
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    os.unlink(temporary)
    return True


def _keep(path: str, number: int) -> None:
    """Replace the ``number``-th earlier snapshot by the next newer one. The newest also stays at
    its path, so that there is a snapshot at any time.
    """
    older, previous_file = (
        previous(path, number - 1) if number > 1 else path,
        previous(path, number),
    )
    if not os.path.exists(older):
        return
    if number == 1:
        temporary_link = f"{path}.tmp-{socket.gethostname()}-{os.getpid()}-kept"
        try:
            os.link(path, temporary_link)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        else:
            os.replace(temporary_link, previous_file)
            # If both were links to one file, rename does nothing.
            if os.path.exists(temporary_link):
                os.unlink(temporary_link)
            return
    os.replace(older, previous_file)


def _torch_save(payload: dict[str, Any], writer: _Writer) -> None:
    import torch

    # The user may have disabled check sums for speed. Without them a damaged snapshot cannot be
    # detected.
    get, put = (
        getattr(torch.serialization, "get_crc32_options", None),
        getattr(torch.serialization, "set_crc32_options", None),
    )
    was_enabled = get() if get and put else True
    try:
        if put and not was_enabled:
            put(True)
        torch.save(payload, writer)  # type: ignore[arg-type]
    except Exception:
        if writer.error is None:
            raise
    finally:
        if put and not was_enabled:
            put(was_enabled)


def sync_folder(folder: str) -> None:
    """Flush the entries of ``folder`` to disk. Empty means the working folder."""
    try:
        fd = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # a folder that is writable but not readable
        return
    try:
        os.fsync(fd)
    except OSError as error:
        # some file systems have no fsync of folders
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):
            raise
    finally:
        os.close(fd)


def remove_leftovers(path: str) -> None:
    """Remove the temporary files of processes that were killed while they saved to ``path``. If
    such a process still runs, one of its saves fails.
    """
    own_temporary = f"{path}.tmp-{socket.gethostname()}-{os.getpid()}"
    for name in glob.glob(glob.escape(path) + ".tmp-*"):
        if name != own_temporary:
            try:
                os.unlink(name)
            except OSError:
                pass


def read(path: str, check: bool = True) -> dict[str, Any]:
    """Load the snapshot at ``path`` to the CPU. With ``check`` the check sums of all records are
    verified first.

    Only plain data is unpickled (``weights_only``), unless the snapshot holds objects of other
    classes *and* only this user, its owner, can have written it.

    Raises:
        SnapshotError: the file is damaged, has another format, or is not trusted.
        OSError: the file cannot be opened.
    """
    import torch

    with open(path, "rb"):  # absent or unreadable: raises an OSError that says so
        pass
    if check:
        try:
            with zipfile.ZipFile(path) as archive:
                bad = archive.testzip()
        except (
            zipfile.BadZipFile,
            zlib.error,
            EOFError,
            NotImplementedError,
            ValueError,
            OSError,
        ) as error:  # OSError: a damaged directory may make zipfile seek to a negative offset
            raise SnapshotError(f"Snapshot {path} is damaged: {error}.") from error
        if bad is not None:
            raise SnapshotError(
                f"Snapshot {path} is damaged: the check sum of its record {bad} is wrong."
            )
    try:
        payload = _torch_load(torch, path)
    except (SnapshotError, OSError, MemoryError):
        raise
    except Exception as error:  # torch raises whatever its unpickler met
        raise SnapshotError(
            f"Snapshot {path} cannot be loaded: {type(error).__name__}: {str(error)[:300]}."
        ) from error
    if (
        not isinstance(payload, dict)
        or not isinstance(payload.get("objects"), dict)
        or "malletrain_snapshot" not in payload
    ):
        raise SnapshotError(f"{path} is not a snapshot written by malletrain.Snapshot.")
    if payload["malletrain_snapshot"] not in (FORMAT, SHARDED_FORMAT):
        raise SnapshotError(
            f"Snapshot {path} has format {payload['malletrain_snapshot']}, but this malletrain "
            f"reads formats {FORMAT} and {SHARDED_FORMAT}. "
            "Use the release that wrote it."
        )
    return payload


def peek(path: str) -> dict[str, Any] | None:
    """Load the snapshot at ``path`` without reading its tensors or checking anything. Return None
    if it cannot be read this way.
    """
    import torch

    try:
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # absent, damaged, or not plain data: the caller reads it in full
        return None
    return payload if isinstance(payload, dict) and "malletrain_snapshot" in payload else None


def _torch_load(torch: Any, path: str) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        status = os.stat(path)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise SnapshotError(
                f"Snapshot {path} holds objects that only full unpickling can restore, which "
                "may run code, and it could have been "
                "written by somebody else (you are not its owner, or others may write to it). "
                "If you trust it: copy it and "
                "chmod go-w the copy."
            ) from error
    return torch.load(path, map_location="cpu", weights_only=False)


def signature(path: str) -> tuple[int, int, int] | None:
    """Return (inode, modification time in ns, size) of the file at ``path``; None if there is
    none.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


class BlockSums(NamedTuple):
    """Check sums of one file."""

    block: int
    """Block size, bytes; the last block may be shorter."""
    sums: bytes
    """CRC-32 of each block, 4 bytes each, little-endian."""


def block_of(size: int) -> int:
    """Return the block size, bytes, for a file of ``size`` bytes: a power of two."""
    block = MIN_BLOCK_BYTES
    while block * MAX_BLOCKS < size:
        block *= 2
    return block


def sums_of(path: str) -> tuple[int, int, BlockSums]:
    """Return (size in bytes, CRC-32, block check sums) of a file. Reads it once. Raises OSError."""
    with open(path, "rb") as file:
        block = block_of(os.fstat(file.fileno()).st_size)
        size = total = 0
        sums: list[int] = []
        while piece := file.read(max(_PIECE, block)):
            size += len(piece)
            total = zlib.crc32(piece, total)
            view = memoryview(piece)
            sums += (zlib.crc32(view[at : at + block]) for at in range(0, len(piece), block))
    return size, total, BlockSums(block, b"".join(s.to_bytes(4, "little") for s in sums))


class BlockFile:
    """Reads parts of a file. If they are read in ascending order, no block is read twice. A context
    manager that closes the file.

    Args:
        path: path of the file.
        sums: check sums of its blocks; with None only the requested bytes are read, and not
            checked.
        damaged: creates the exception for a file that is not what was written.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, sums: BlockSums | None, damaged: Callable[[], Exception]) -> None:
        self._damaged = damaged
        self._block = sums.block if sums else 1
        self._sums = struct.unpack(f"<{len(sums.sums) // 4}I", sums.sums) if sums else None
        self.bytes_read = 0
        self._last_block_at, self._last_block = 0, b""
        """Offset and content of the last block that was read."""
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = os.fstat(self._file).st_size

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read(self, offset: int, length: int) -> memoryview:
        """Return ``length`` bytes from ``offset``, in a writable buffer.

        Raises:
            Exception: the exception of ``damaged``, if a block is not what was written, or the file
                is too short.
            OSError: the disk's error.
        """
        if offset + length > self._size:
            raise self._damaged()
        first = offset - offset % self._block
        end = min(self._size, -(-(offset + length) // self._block) * self._block)
        data = bytearray(end - first)
        cached = 0
        if self._last_block_at <= first < self._last_block_at + len(self._last_block):
            head = self._last_block[first - self._last_block_at : end - self._last_block_at]
            cached = len(head)
            data[:cached] = head
        self._fill(first + cached, memoryview(data)[cached:])
        if self._sums is not None:
            self._last_block_at = (end - 1) // self._block * self._block if end else 0
            self._last_block = bytes(memoryview(data)[self._last_block_at - first :])
        return memoryview(data)[offset - first : offset - first + length]

    def _fill(self, at: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with whole blocks of the file from offset ``at``."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self._file, [buffer[done:]], at + done)
            if count == 0:
                raise self._damaged()
            done += count
        self.bytes_read += done
        if self._sums is None:
            return
        for number, start in enumerate(range(0, len(buffer), self._block), at // self._block):
            sum_ = zlib.crc32(buffer[start : start + self._block])
            if number >= len(self._sums) or self._sums[number] != sum_:
                raise self._damaged()
