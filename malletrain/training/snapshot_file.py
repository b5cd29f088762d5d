"""Snapshot files: written so that a good one is always on disk, read so that a bad one is noticed.

Decides how bytes reach the disk (temporary file, flush, fsync, atomic rename, fsync of the folder),
how many earlier snapshots stay beside the newest, and whether a file is whole. It does not decide
when a snapshot is taken or what is in it (:mod:`malletrain.training.snapshot`).

A snapshot is an ordinary ``torch.save`` file, a zip archive whose records carry CRC-32 sums; they
are checked on reading, because torch does not and would load flipped bits as weights.
"""

from __future__ import annotations

import errno
import glob
import os
import pickle
import socket
import zipfile
import zlib
from collections.abc import Callable
from typing import IO, Any

from malletrain.protocol.fault_points import FaultPoint, reached

FORMAT = 1
"""Of a snapshot that is whole in its file."""
SHARDED_FORMAT = 2
"""Of one whose file names shards beside it (:mod:`malletrain.training.shard_files`)."""

_COPY_BYTES = 4 << 20
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES)
"""What a file system without hard links says to one."""


class SnapshotError(RuntimeError):
    """A snapshot that cannot be used; the message is a sentence with the path."""


class ForeignSnapshotError(SnapshotError):
    """The place of a snapshot is taken by another run's: training on would keep nothing."""


class DamagedSnapshotError(SnapshotError):
    """What was read of a snapshot is not what was written; the one before may be."""


def _marker(path: str) -> str:
    return f"{path}.open-epoch"


def mark_open_epoch(path: str, identity: str) -> None:
    """Before the snapshot ``identity`` is written at ``path``: it is taken in the code after the
    steps of an epoch, and not to be resumed from before that code has run.

    Raises:
        OSError: the disk's reason.
    """
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(_marker(path), "a") as file:
        file.write(identity + "\n")
        file.flush()
        os.fsync(file.fileno())


def close_epoch(path: str) -> None:
    """The code after the steps of the epoch has run: the snapshot at ``path`` is as good as any."""
    try:
        os.unlink(_marker(path))
    except OSError:  # absent; or it stays, and the epoch is done again from the one before
        pass


def in_open_epoch(path: str) -> frozenset[str]:
    """Ids of the snapshots at ``path`` that were taken in the code after the steps of an epoch, of
    which nobody has said since that it ended: the scheduler's step may be missing in them.
    """
    try:
        with open(_marker(path)) as file:
            return frozenset(file.read().split())
    except (OSError, UnicodeDecodeError):
        return frozenset()


def resumable(path: str) -> str:
    """Path of the newest snapshot at ``path`` that is not of an open epoch."""
    marked = in_open_epoch(path)
    there = peek(path) if marked else None
    return previous(path, 1) if there is not None and there.get("id") in marked else path


def previous(path: str, number: int) -> str:
    """Path of the ``number``-th snapshot before the newest: ``path.prev``, ``path.prev2``, …"""
    return f"{path}.prev" + (str(number) if number > 1 else "")


def candidates(path: str, keep: int) -> list[str]:
    """The snapshots on disk, newest first."""
    return [
        name
        for name in (path, *(previous(path, number) for number in range(1, keep + 1)))
        if os.path.exists(name)
    ]


class _Writer:
    """A file for torch.save that remembers the first failure: torch hides it behind an internal
    error of its zip writer.
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
    """Write ``payload`` as the newest snapshot at ``path`` and keep ``keep`` earlier ones. Returns
    its size in bytes.

    Whatever happens in between (full disk, SIGKILL, power), the newest or the one before it is
    whole.

    Args:
        path, payload, keep: see above.
        keep_newest: False: the file at ``path`` (known to be damaged) is replaced, and the earlier
            ones stay as they are.
        overtaken: for the first snapshot at ``path``: what is asked when another process has
            written one there in the meantime. It raises to leave that alone.

    Raises:
        OSError: the disk's reason; the snapshots on disk are as before and the temporary file is
            gone.
    """
    return _write(path, keep, keep_newest, overtaken, lambda file: write_to(file, payload))


def write_copy(
    path: str,
    source: IO[bytes],
    keep: int,
    keep_newest: bool = True,
    overtaken: Callable[[], None] | None = None,
) -> int:
    """As :func:`write`, of a snapshot that ``source`` is a file of."""

    def copy(file: IO[bytes]) -> int:
        size = 0
        while piece := source.read(_COPY_BYTES):
            file.write(piece)
            size += len(piece)
        return size

    return _write(path, keep, keep_newest, overtaken, copy)


def write_to(file: IO[bytes], payload: dict[str, Any]) -> int:
    """Write ``payload`` to ``file``. Returns its bytes; raises OSError."""
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
        # Others may read but never write it: restoring trusts a file that only its owner can have
        # written.
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
    """Put the first snapshot in its place; False when there is one, or none can be told from a
    second one here (a file system without hard links, on which two runs may overtake each other).
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
    """Let the ``number``-th earlier snapshot be what the one after it is. The newest stays in its
    place, too: nobody ever sees none.
    """
    older, previous_file = (
        previous(path, number - 1) if number > 1 else path,
        previous(path, number),
    )
    if not os.path.exists(older):
        return
    if number == 1:
        spare = f"{path}.tmp-{socket.gethostname()}-{os.getpid()}-kept"
        try:
            os.link(path, spare)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        else:
            os.replace(spare, previous_file)
            if os.path.exists(spare):  # both were one file already: then a rename does nothing
                os.unlink(spare)
            return
    os.replace(older, previous_file)


def _torch_save(payload: dict[str, Any], writer: _Writer) -> None:
    import torch

    # A user may have turned the sums off for speed; without them a damaged snapshot could not be
    # told from a good one.
    get, put = (
        getattr(torch.serialization, "get_crc32_options", None),
        getattr(torch.serialization, "set_crc32_options", None),
    )
    before = get() if get and put else True
    try:
        if put and not before:
            put(True)
        torch.save(payload, writer)  # type: ignore[arg-type]
    except Exception:
        if writer.error is None:
            raise
    finally:
        if put and not before:
            put(before)


def sync_folder(folder: str) -> None:
    """Have the entries of ``folder`` (empty: the working folder) on disk."""
    try:
        fd = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # a folder that may be written but not read
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):  # some file systems have no fsync of folders
            raise
    finally:
        os.close(fd)


def remove_leftovers(path: str) -> None:
    """Remove the temporary files of processes that were killed while they saved to ``path`` (one
    that still lives fails once, no more).
    """
    mine = f"{path}.tmp-{socket.gethostname()}-{os.getpid()}"
    for name in glob.glob(glob.escape(path) + ".tmp-*"):
        if name != mine:
            try:
                os.unlink(name)
            except OSError:
                pass


def read(path: str, check: bool = True) -> dict[str, Any]:
    """Load the snapshot at ``path`` to the CPU; ``check`` verifies the sums of every record first.

    Only plain data is unpickled (``weights_only``), unless the snapshot holds objects of other
    classes *and* nobody but its owner, this user, can have written it.

    Raises:
        SnapshotError: when it is damaged, of another format, or may not be trusted.
        OSError: when it cannot be opened.
    """
    import torch

    with open(path, "rb"):  # absent or unreadable: an OSError, which says so itself
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
        ) as error:  # OSError: a damaged directory may send zipfile to a negative place
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
            "Go on with the release that wrote it."
        )
    return payload


def peek(path: str) -> dict[str, Any] | None:
    """What the snapshot at ``path`` says of itself, without its tensors being read or anything
    checked; None where there is none that can be read this way.
    """
    import torch

    try:
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # absent, damaged, or in need of more than plain data: to be read in full
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
    """Identifies the file that is at ``path`` now, None when there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
