"""Copies the results of a job into a folder: its newest snapshot with its shards, the weights of a
model, its logs.

:func:`snapshot_of` decides which snapshot is the job's. The weights are exported from it to one
file (:func:`export_weights`).
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import TextIO

from malletrain.protocol.views import JobDetail
from malletrain.submission.resuming import snapshot_paths


def snapshot_of(detail: JobDetail, daemon: str) -> str:
    """Return the path of the job's snapshot: one that its command or script names, else the one in
    its default folder. Snapshots that record another job as their owner are ignored.

    Args:
        detail: the job.
        daemon: the name of its daemon (:func:`malletrain.protocol.messages.daemon_of`).

    Raises:
        malletrain.training.snapshot_file.SnapshotError: there is no snapshot, or more than one.
    """
    from malletrain.training.owner import RunIdentity, owner_in, path_of_job
    from malletrain.training.snapshot_file import SnapshotError

    spec, job = detail.spec, detail.job.id
    own_job = RunIdentity(job, "", "", daemon)
    named = snapshot_paths(spec["script"], spec.get("args", ()), spec["workdir"])
    owner_of = {path: owner_in(path) for path in sorted(named) if os.path.isfile(path)}
    for path, owner in owner_of.items():
        if owner is None or (owner.job == job and owner.may_share(own_job)):
            return path
    try:
        return path_of_job(job, spec["workdir"], daemon)
    except SnapshotError as error:
        for path, owner in owner_of.items():
            raise SnapshotError(
                f"The snapshot {path}, which job {job} names, belongs to {owner}"
                f"{'' if owner is None or owner.may_share(own_job) else ' of another daemon'}. "
                f"To have that one, name it by its path. {error}"
            ) from None
        raise


def export_weights(
    detail: JobDetail, daemon: str, out: str | os.PathLike[str] | None, name: str
) -> Path:
    """Write the weights of a model as safetensors. Return the file. Needs torch.

    Args:
        detail: the job.
        daemon: see :func:`snapshot_of`.
        out: the file; None: the job's name with the suffix ``.safetensors``, in the current
            directory.
        name: name of the model in the snapshot.

    Raises:
        malletrain.training.snapshot_file.SnapshotError: there is no good snapshot, or no such model
        in it.
    """
    from malletrain.training.export import read_weights, write_safetensors

    file = Path(out) if out is not None else Path(f"{detail.job.name}.safetensors")
    write_safetensors(read_weights(snapshot_of(detail, daemon), name), os.fspath(file))
    return file


SHARDS = ".shards"
TRIES = 5
"""Maximum number of attempts: a running job may write its next snapshot, and remove this one,
during the copy."""
_PIECE = 4 << 20
"""Bytes that are copied at once."""


class _Replaced(Exception):
    """The job wrote another snapshot while its last one was copied."""


def copy_snapshot(detail: JobDetail, daemon: str, folder: Path) -> list[Path]:
    """Copy the newest snapshot of a job. Return the file, and the folder of its shards if it has
    any. An earlier copy in ``folder`` is replaced once the new one is complete.

    Args:
        detail: the job.
        daemon: see :func:`snapshot_of`.
        folder: where to copy to.

    Raises:
        malletrain.training.snapshot_file.SnapshotError: there is no snapshot, ``folder`` is where
        the job writes it, or it is written faster than it can be copied.
        OSError: a file cannot be read or written.
    """
    from malletrain.training.snapshot_file import SnapshotError

    source = snapshot_of(detail, daemon)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / os.path.basename(source)
    if target.exists() and os.path.samefile(source, target):
        raise SnapshotError(
            f"{folder} is the folder to which the job writes its snapshot {source}. Name another "
            "folder."
        )
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=folder) as parts:
        for _ in range(TRIES):
            try:
                return _copy_once(source, target, Path(tempfile.mkdtemp(dir=parts)))
            except _Replaced:
                continue
    raise SnapshotError(
        f"The job replaced its snapshot {source} {TRIES} times while it was copied. Copy it when "
        "the job writes less often, or has ended."
    )


def _copy_once(source: str, target: Path, parts: Path) -> list[Path]:
    """Copy a snapshot and its shards into ``parts``, which is empty, then move them to ``target``.

    Raises:
        _Replaced: what was copied is not one snapshot.
        OSError: a file cannot be read or written.
    """
    part, shard_parts = parts / "snapshot", parts / "shards"
    try:
        identity = _copy_file(source, part)
        if not os.path.isdir(source + SHARDS):
            os.replace(part, target)
            return [target]
        numbers = _shard_folders(part, source)
        for number in numbers:
            shutil.copytree(os.path.join(source + SHARDS, number), shard_parts / number)
        if identity != _identity(os.stat(source)):
            raise _Replaced
    except FileNotFoundError:
        raise _Replaced from None
    except shutil.Error as error:
        failures = error.args[0]
        path, _, why = failures[0]
        if all(not os.path.exists(each) for each, _, _ in failures):  # removed by the job
            raise _Replaced from None
        raise OSError(errno.EIO, str(why), str(path)) from None
    shards = Path(f"{target}{SHARDS}")
    shards.mkdir(exist_ok=True)
    for number in numbers:
        shutil.rmtree(shards / number, ignore_errors=True)
        os.replace(shard_parts / number, shards / number)
    os.replace(part, target)
    for other in set(os.listdir(shards)) - set(numbers):
        shutil.rmtree(shards / other, ignore_errors=True)
    return [target, shards]


def _copy_file(source: str, target: Path) -> tuple[int, ...]:
    """Copy a file; return its identity. Raises _Replaced if it was written meanwhile."""
    with open(source, "rb") as file, open(target, "xb") as out:
        before = os.fstat(file.fileno())
        while piece := file.read(_PIECE):
            out.write(piece)
        if _identity(os.fstat(file.fileno())) != _identity(before):
            raise _Replaced
    os.chmod(target, before.st_mode & 0o777)
    os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
    return _identity(before)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _shard_folders(snapshot: Path, source: str) -> list[str]:
    """Return the folders in ``source``'s folder of shards that belong to the snapshot: the one it
    names, or all if it names none that is there.
    """
    from malletrain.training.owner import plain_payload

    shards = (plain_payload(os.fspath(snapshot)) or {}).get("shards")
    named = os.path.basename(str(shards.get("folder", ""))) if isinstance(shards, dict) else ""
    folders = [entry.name for entry in os.scandir(source + SHARDS) if entry.is_dir()]
    if named and named not in folders:
        raise _Replaced
    return [named] if named else sorted(folders)


def open_log(folder: Path, stream: str) -> TextIO:
    """Open the file of one log in ``folder`` for writing."""
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"{stream}.log").open("w", encoding="utf-8")
