"""Where the newest snapshot of a job is, and its weights in one file."""

from __future__ import annotations

import os
from pathlib import Path

from malletrain.protocol.views import JobDetail
from malletrain.submission.snapshot_paths import snapshot_paths


def snapshot_of(detail: JobDetail) -> str:
    """The path of the job's snapshot: one that its command or script names, else that in its
    default folder.

    Raises:
        malletrain.training.snapshot_file.SnapshotError: there is none, or more than one.
    """
    from malletrain.training.owner import path_of

    spec = detail.spec
    named = snapshot_paths(spec["script"], spec.get("args", ()), spec["workdir"])
    there = sorted(path for path in named if os.path.isfile(path))
    return there[0] if there else path_of(detail.job.id, spec["workdir"])


def export_weights(detail: JobDetail, out: str | os.PathLike[str] | None, name: str) -> Path:
    """Write the weights of the model ``name`` as safetensors; returns the file. Needs torch.

    Raises:
        malletrain.training.snapshot_file.SnapshotError: there is no good snapshot, or no such
            model in it.
    """
    from malletrain.training.export import read_weights, write_safetensors

    file = Path(out) if out is not None else Path(f"{detail.job.name}.safetensors")
    write_safetensors(read_weights(snapshot_of(detail), name), os.fspath(file))
    return file
