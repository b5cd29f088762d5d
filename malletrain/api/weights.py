"""Where the newest snapshot of a job is, and its weights in one file."""

from __future__ import annotations

import os
from pathlib import Path

from malletrain.protocol.views import JobDetail
from malletrain.submission.snapshot_paths import snapshot_paths


def snapshot_of(detail: JobDetail, daemon: str) -> str:
    """The path of the job's snapshot: one that its command or script names, else that in its
    default folder. One that says that it is another job's is none of this job.

    Args:
        detail: the job.
        daemon: the name of its daemon (:func:`malletrain.protocol.boot.daemon_of`).

    Raises:
        malletrain.training.snapshot_file.SnapshotError: there is none, or more than one.
    """
    from malletrain.training.owner import Owner, path_of
    from malletrain.training.snapshot_file import SnapshotError
    from malletrain.training.snapshot_records import owner_in

    spec, job = detail.spec, detail.job.id
    mine = Owner(job, "", "", daemon)
    named = snapshot_paths(spec["script"], spec.get("args", ()), spec["workdir"])
    there = {path: owner_in(path) for path in sorted(named) if os.path.isfile(path)}
    for path, theirs in there.items():
        if theirs is None or (theirs.job == job and theirs.may_share(mine)):
            return path
    try:
        return path_of(job, spec["workdir"], daemon)
    except SnapshotError as error:
        for path, theirs in there.items():
            raise SnapshotError(
                f"The snapshot {path}, which job {job} names, belongs to {theirs}"
                f"{'' if theirs is None or theirs.may_share(mine) else ' of another daemon'}. "
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
