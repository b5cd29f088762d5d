"""The snapshot from which a job starts, and the snapshot folders that its container must see."""

from __future__ import annotations

import os

import msgspec

from malletrain.protocol import env
from malletrain.protocol.messages import JobSpec, SoftwareEnvironment
from malletrain.submission.error import SpecError
from malletrain.submission.snapshot_paths import snapshot_paths


def file_of(source: str) -> str | None:
    """Returns the absolute path of the snapshot that ``--resume-from`` names; None if it names a
    job.

    Raises:
        SpecError: it is a path at which there is no file.
    """
    if os.path.exists(source):
        return os.path.abspath(source)
    if os.sep in source:
        raise SpecError(f"--resume-from: there is no file {source}.", "resume_from")
    return None


def resuming(spec: JobSpec, source: str) -> JobSpec:
    """Returns the job that starts from ``source``: the path of a snapshot, or the id of a job."""
    return msgspec.structs.replace(spec, env={**spec.env, env.RESUME_FROM: source})


def with_snapshots_bound(spec: JobSpec) -> JobSpec:
    """Returns the job with its existing snapshot folders added to the bind mounts of its container.
    The container may be the site's default, which only the daemon knows.
    """
    software = spec.software or SoftwareEnvironment()
    has_own_environment = software.container is None and (software.conda or software.venv)
    if software.container == "" or has_own_environment:
        return spec
    paths = snapshot_paths(spec.script, spec.args, spec.workdir)
    if os.path.isabs(source := spec.env.get(env.RESUME_FROM, "")):
        paths.add(source)
    visible = (spec.workdir, os.path.dirname(spec.script), os.path.expanduser("~"))
    named = {os.path.dirname(path) for path in paths}
    extra = sorted(
        folder
        for folder in named
        if os.path.isdir(folder)
        and ":" not in folder
        and folder.isprintable()
        and not any(os.path.commonpath([folder, place]) == place for place in visible)
    )
    if not extra:
        return spec
    software = msgspec.structs.replace(software, binds=(*software.binds, *extra))
    return msgspec.structs.replace(spec, software=software)
