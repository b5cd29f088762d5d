"""The shards of a snapshot on disk: a folder in the format of ``torch.distributed.checkpoint``.

Decides how shards become durable, whether they are complete, and when they are removed. The folder
is in ``PATH.shards``. It is valid only once the snapshot file at ``PATH``, which names the folder
and the sizes and check sums of its files, is renamed into place
(:mod:`malletrain.training.snapshot_file`). Everything in the folder is on disk before that.
:mod:`malletrain.training.sharded_state` decides the content of the shards.
"""

from __future__ import annotations

import errno
import os
import shutil
import warnings
import zlib
from collections.abc import Mapping
from typing import Any

from malletrain.training import snapshot_file
from malletrain.training.side_group import Team
from malletrain.training.snapshot_file import BlockSums, SnapshotError, sums_of

SUFFIX = ".shards"
KEY = "shards"
"""Key in a snapshot: folder of its shards, and their files."""
SUMS = "sums"
"""Key in :data:`KEY`: check sums of the blocks of each file. Older snapshots have none."""
METADATA = ".metadata"
"""Name of the file that locates each tensor part in the folder."""
_PIECE = 4 << 20
Sealed = dict[str, tuple[int, int, BlockSums]]
"""(size in bytes, CRC-32, block check sums) by file name."""


def new_folder(path: str, number: str) -> str:
    """Create the folder ``number`` for the shards of a snapshot at ``path``."""
    folder = os.path.join(path + SUFFIX, number)
    os.makedirs(folder, mode=0o755)
    return folder


def folder_of(payload: Mapping[str, Any], name: str) -> str:
    """Return the folder of the shards of the snapshot at ``name``; empty if it has none."""
    shards = payload.get(KEY)
    return os.path.join(os.path.dirname(name), shards["folder"]) if shards else ""


# --- write ---


def write(folder: str, tensors: Mapping[str, Any], team: Team) -> None:
    """Write each rank's shards of ``tensors`` to ``folder``. Collective.

    Args:
        folder: the folder.
        tensors: DTensors by key.
        team: all ranks.

    Raises:
        OSError: the disk's error, on all ranks.
        RuntimeError: another error of a rank, on all ranks.
    """
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is only one process
        try:
            dcp.save(
                dict(tensors),
                storage_writer=dcp.FileSystemWriter(folder),
                process_group=team.group,
                no_dist=team.group is None,
            )
        except dcp.CheckpointException as error:
            needed = sum(t.numel() * t.element_size() for t in tensors.values()) // team.world
            raise _as_exception(error, folder, needed) from error


def _as_exception(error: Any, folder: str, needed: int) -> Exception:
    """Return the failure of a rank as an ordinary exception, because torch hides a full disk behind
    an internal error.
    """
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    for _, (other, _) in sorted(error.failures.items()):
        if isinstance(other, OSError) and other.errno is not None:
            return OSError(other.errno, os.strerror(other.errno), folder)
    if shutil.disk_usage(folder).free < needed:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
    first = " ".join(str(cause).split("\n", 1)[0].split())
    return RuntimeError(f"rank {rank}: {type(cause).__name__}: {first[:300]}")


def seal(folder: str, rank: int) -> Sealed:
    """Flush the entries of ``folder`` to disk, and return the check sums of the files that ``rank``
    wrote.

    Other users can read but not write the files: restoring trusts files that only their owner can
    have written.
    """
    prefix = f"__{rank}_"
    return _sums_of_files(folder, [n for n in os.listdir(folder) if n.startswith(prefix)])


def seal_rest(path: str, folder: str, sealed: list[Sealed]) -> dict[str, Any]:
    """Do on rank 0 what :func:`seal` does on every rank, for the files that belong to no rank; then
    flush the parent folders.

    Args:
        path: path of the snapshot.
        folder: folder of its shards.
        sealed: results of :func:`seal` on all ranks.

    Returns:
        The entry of the snapshot under :data:`KEY`.
    """
    files = {name: value for part in sealed for name, value in part.items()}
    files.update(_sums_of_files(folder, sorted(set(os.listdir(folder)) - set(files))))
    snapshot_file.sync_folder(path + SUFFIX)
    snapshot_file.sync_folder(os.path.dirname(path))
    return {
        "folder": os.path.relpath(folder, os.path.dirname(path) or "."),  # both can be moved
        "files": {name: (size, total) for name, (size, total, _) in files.items()},
        SUMS: {name: tuple(blocks) for name, (_, _, blocks) in files.items()},
    }


def _sums_of_files(folder: str, names: list[str]) -> Sealed:
    files: Sealed = {}
    for name in names:
        full = os.path.join(folder, name)
        os.chmod(full, os.stat(full).st_mode & 0o755)
        files[name] = sums_of(full)
    snapshot_file.sync_folder(folder)
    return files


def sum_of(path: str) -> tuple[int, int]:
    """Return (size in bytes, CRC-32) of a file. Raises OSError."""
    size = total = 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            size += len(piece)
            total = zlib.crc32(piece, total)
    return size, total


def remove(folder: str) -> None:
    """Remove the shards of a snapshot that failed."""
    shutil.rmtree(folder, ignore_errors=True)


def sweep(path: str, keep: int) -> None:
    """Remove the shards at ``path`` that no snapshot names: those of older snapshots, and of killed
    saves.
    """
    root = path + SUFFIX
    try:
        unused_names = set(os.listdir(root))
    except OSError:
        return
    for name in snapshot_file.candidates(path, keep):
        try:
            payload = snapshot_file.read(name, check=False)
        except (SnapshotError, OSError):
            continue  # its shards are useless without it
        unused_names.discard(os.path.basename(folder_of(payload, name)))
    for unused in unused_names:
        remove(os.path.join(root, unused))


# --- read ---


def check(payload: Mapping[str, Any], name: str) -> None:
    """Check that the shards of a snapshot exist, have the recorded sizes, and can have been written
    only by this user.

    Raises:
        SnapshotError: the check fails.
    """
    folder = folder_of(payload, name)
    if not folder:
        return
    for file, (size, _) in payload[KEY]["files"].items():
        path = os.path.join(folder, file)
        try:
            status = os.stat(path)
        except OSError as error:
            raise SnapshotError(
                f"Snapshot {name} has lost its shards: {path}: {error.strerror}. Keep the file and "
                f"the folder {os.path.basename(os.path.dirname(folder))} beside it together."
            ) from error
        if status.st_size != size:
            raise SnapshotError(
                f"Snapshot {name} is damaged: {path} has {status.st_size} bytes and not {size}."
            )
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise SnapshotError(
                f"The shards of snapshot {name} could have been written by somebody else (you are "
                f"not the owner of {path}, or others may write to it), and reading them may run "
                "code. If you trust them: copy file and folder, and chmod -R go-w the copy."
            )


def check_sums(payload: Mapping[str, Any], name: str, part: int = 0, parts: int = 1) -> None:
    """Check the check sums of one part of the shard files.

    Args:
        payload: the snapshot.
        name: its path.
        part: number of the part, from 0.
        parts: number of parts into which the files are divided.

    Raises:
        SnapshotError: a check sum is wrong.
    """
    for file in sorted(payload[KEY]["files"])[part::parts]:
        _check_sum(payload, name, file)


def check_before_reading(
    payload: Mapping[str, Any], name: str, part: int = 0, parts: int = 1
) -> None:
    """Check the files that :func:`reader` does not check itself: only the metadata, if block check
    sums are known, else as :func:`check_sums`.

    Args:
        payload: the snapshot.
        name: its path.
        part: number of the part, from 0.
        parts: number of parts into which the files are divided.

    Raises:
        SnapshotError: a check sum is wrong.
    """
    if payload[KEY].get(SUMS):
        _check_sum(payload, name, METADATA)
    else:
        check_sums(payload, name, part, parts)


def _check_sum(payload: Mapping[str, Any], name: str, file: str) -> None:
    path = os.path.join(folder_of(payload, name), file)
    try:
        total = sum_of(path)
    except OSError as error:
        raise SnapshotError(f"Snapshot {name} is damaged: {path}: {error.strerror}.") from error
    if total != tuple(payload[KEY]["files"][file]):
        raise SnapshotError(f"Snapshot {name} is damaged: the check sum of {path} is wrong.")


def reader(payload: Mapping[str, Any], name: str) -> Any:
    """Return a reader of the shards of a snapshot. It checks what it reads if block check sums are
    known (:class:`malletrain.training.shard_reader.RowReader`).
    """
    from malletrain.training.shard_reader import RowReader

    sums = {file: BlockSums(*blocks) for file, blocks in payload[KEY].get(SUMS, {}).items()}
    return RowReader(folder_of(payload, name), sums, name)


def shapes(reader: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return (shape, dtype) by key for the tensors in the shards of ``reader``."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return {
        key: (tuple(entry.size), entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read(reader: Any, tensors: dict[str, Any], team: Team | None = None) -> None:
    """Fill ``tensors`` from shards; the layouts may differ. Collective.

    Args:
        reader: reader of the shards.
        tensors: tensors or DTensors to fill, by key.
        team: all ranks; None if only this process reads.

    Raises:
        SnapshotError: the shards are not what was written; raised on all ranks.
        RuntimeError: the error of a rank, on all ranks.
    """
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.load(
                tensors,
                storage_reader=reader,
                process_group=team.group if team else None,
                no_dist=team is None or team.group is None,
            )
        except dcp.CheckpointException as error:
            for _, (cause, _) in sorted(error.failures.items(), key=lambda item: item[0]):
                if isinstance(cause, SnapshotError):
                    raise cause from error
            raise _as_exception(error, str(reader.checkpoint_id), 0) from error
