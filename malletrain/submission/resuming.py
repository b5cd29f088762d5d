"""A job that continues another: the snapshot from which it starts, the snapshot folders that its
container must see, and the resubmission of an ended job. Pure but for reading scripts.

:func:`snapshot_paths` finds the snapshot files that a job will write, as far as its command and its
script name them. It reads the script and never runs it. It finds options such as ``--snapshot
PATH``, and paths that the script names literally in ``Snapshot("run.pt", …)`` or
``Run(snapshot="run.pt", …)``. A path that the script computes is not found.

A resubmitted job takes over everything of the old one that did not belong to that run only.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from malletrain.protocol import env
from malletrain.protocol.bounds import JOB_ID
from malletrain.protocol.messages import JobSpec, SoftwareEnvironment
from malletrain.protocol.views import JobDetail
from malletrain.submission.error import SpecError

_OPTION = re.compile(r"--?[\w-]*(?:snapshot|checkpoint|ckpt)(?:[_-]?(?:path|file))?", re.IGNORECASE)


def snapshot_paths(script: str, args: Sequence[str], workdir: str) -> set[str]:
    """Return the absolute paths of the snapshots that a job names.

    Args:
        script: its script.
        args: the script's arguments.
        workdir: the folder it runs in.
    """
    paths = {*_in_arguments(args), *_in_script(script)}
    return {os.path.normpath(os.path.join(workdir, os.path.expanduser(path))) for path in paths}


def _in_arguments(args: Sequence[str]) -> Iterator[str]:
    for number, arg in enumerate(args):
        option, equals, value = arg.partition("=")
        if not _OPTION.fullmatch(option):
            continue
        if equals:
            yield value
        elif number + 1 < len(args) and not args[number + 1].startswith("-"):
            yield args[number + 1]


def _in_script(script: str) -> Iterator[str]:
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # not readable as Python: no paths are found
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else None
        name = call.func.id if isinstance(call.func, ast.Name) else name
        named = {word.arg: word.value for word in call.keywords}
        value: ast.expr | None = None
        if name == "Snapshot":
            value = call.args[0] if call.args else named.get("path")
        elif name == "Run":
            value = named.get("snapshot")
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value


def file_of(source: str) -> str | None:
    """Return the absolute path of the snapshot that ``--resume-from`` names; None if it names a
    job.

    Raises:
        SpecError: it is a path at which there is no file.
    """
    # A folder with a job's id as its name is not meant: `malletrain cp j3 j3` makes one.
    if os.path.isfile(source) or (os.path.exists(source) and not JOB_ID.fullmatch(source)):
        return os.path.abspath(source)
    if os.sep in source:
        raise SpecError(f"--resume-from: there is no file {source}.", "resume_from")
    return None


def resuming(spec: JobSpec, source: str) -> JobSpec:
    """Return the job that starts from ``source``: the path of a snapshot, or the id of a job."""
    return msgspec.structs.replace(spec, env={**spec.env, env.RESUME_FROM: source})


def with_snapshots_bound(spec: JobSpec) -> JobSpec:
    """Return the job with its existing snapshot folders added to the bind mounts of its container.
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


def resubmitted(spec: JobSpec, job: str, more: Sequence[str], now: float) -> JobSpec:
    """Return a job that resumes from the snapshot of ``job``, which was submitted as ``spec``.

    Its arguments are those of the old job followed by ``more``, because in most scripts the last
    value of an option counts. A deadline before ``now`` (epoch seconds) and the jobs that the old
    job waited for are left out. If ``more`` is not empty, the work is left out too, because it may
    have changed.
    """
    goals: dict[str, float | None] = {}
    if spec.deadline is not None and spec.deadline <= now:
        goals["deadline"] = None
    if more:
        goals["work"] = None
    changed = msgspec.structs.replace(
        spec, key="", after=(), args=(*spec.args, *more), owner="", **goals
    )
    return resuming(changed, job)


def requeued(old: JobDetail, more: Sequence[object], now: float, user: str) -> JobSpec:
    """Return the job of :func:`resubmitted` for ``user``, from a job as the daemon shows it.

    Raises:
        SpecError: the job has not ended, belongs to another user, or is a farm.
    """
    if old.job.owner != user:
        raise SpecError(
            f"Job {old.job.id} belongs to {old.job.owner}; only {old.job.owner} can do this."
        )
    if old.job.ended is None:
        raise SpecError(f"Job {old.job.id} ({old.job.name}) is {old.job.state}; it has not ended.")
    spec = msgspec.convert(old.spec, JobSpec)
    if spec.farm is not None:
        raise SpecError(
            f"Job {old.job.id} ({old.job.name}) is a farm, whose tasks are not part of its "
            "specification; `malletrain map` takes the rows of those that failed again."
        )
    return resubmitted(spec, old.job.id, [str(word) for word in more], now)


def omissions(old: JobSpec, new: JobSpec) -> list[str]:
    """Return sentences about what :func:`resubmitted` has left out."""
    sentences = []
    if old.after:
        sentences.append(
            f"Unlike the old one it does not wait for {', '.join(old.after)} (--after). If it has "
            "to, submit it with malletrain submit --after."
        )
    if old.deadline is not None and new.deadline is None:
        sentences.append("The old one's deadline is over and left out.")
    if old.work is not None and new.work is None:
        sentences.append("The old one's --work is left out, because the arguments differ.")
    return sentences
