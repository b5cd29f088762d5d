"""Copies the results of a job into a folder: its newest snapshot with its shards, the weights of a
model, its logs.

:func:`snapshot_of` decides which snapshot is the job's. The weights are exported from it to one
file (:func:`export_weights`).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from malletrain.protocol.views import JobDetail
from malletrain.submission.resuming import snapshot_paths


def snapshot_of(detail: JobDetail, daemon: str) -> str:
    """Returns the path of the job's snapshot: one that its command or script names, else the one in
    its default folder. Snapshots that record another job as their owner are ignored.

    Args:
        detail: the job.
        daemon: the name of its daemon (:func:`malletrain.protocol.boot.daemon_of`).

    Raises:
        malletrain.training.snapshot_file.SnapshotError: there is no snapshot, or more than one.
    """
    from malletrain.training.owner import Owner, owner_in, path_of
    from malletrain.training.snapshot_file import SnapshotError

    spec, job = detail.spec, detail.job.id
    own_job = Owner(job, "", "", daemon)
    named = snapshot_paths(spec["script"], spec.get("args", ()), spec["workdir"])
    owner_of = {path: owner_in(path) for path in sorted(named) if os.path.isfile(path)}
    for path, owner in owner_of.items():
        if owner is None or (owner.job == job and owner.may_share(own_job)):
            return path
    try:
        return path_of(job, spec["workdir"], daemon)
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
    """Write the weights of the model ``name`` as safetensors; returns the file. Needs torch.
    ``daemon``: see :func:`snapshot_of`.

    Raises:
        malletrain.training.snapshot_file.SnapshotError: there is no good snapshot, or no such
            model in it.
    """
    from malletrain.training.export import read_weights, write_safetensors

    file = Path(out) if out is not None else Path(f"{detail.job.name}.safetensors")
    write_safetensors(read_weights(snapshot_of(detail, daemon), name), os.fspath(file))
    return file


SHARDS = ".shards"
TRIES = 5
"""Maximum number of attempts: a running job may write its next snapshot, and remove this one,
during the copy."""


def copy_snapshot(detail: JobDetail, daemon: str, folder: Path) -> list[Path]:
    """Copy the newest snapshot of a job of ``daemon``; returns the file, and the folder of its
    shards if it has any.

    Raises:
        malletrain.training.snapshot_file.SnapshotError: there is no snapshot.
        OSError: a file cannot be read or written.
    """
    source = snapshot_of(detail, daemon)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / os.path.basename(source)
    shards = Path(f"{target}{SHARDS}")
    for remaining in reversed(range(TRIES)):
        try:
            shutil.copy2(source, target)
            if not os.path.isdir(source + SHARDS):
                return [target]
            shutil.rmtree(shards, ignore_errors=True)
            shutil.copytree(source + SHARDS, shards)
            if os.stat(source).st_mtime_ns == os.stat(target).st_mtime_ns or not remaining:
                return [target, shards]
        except (FileNotFoundError, shutil.Error):
            if not remaining:
                raise
    return [target]


def write_log(folder: Path, stream: str, lines: list[str]) -> Path:
    """Write one log; returns its file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{stream}.log"
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file
