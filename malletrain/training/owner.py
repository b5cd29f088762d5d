"""Whose snapshot a file is, and where a run's own lies when the script names no path.

Decides what names a run (its job, its script, its arguments), which snapshots are another's, and
when another's may be used: only when that was asked for. Standard library only.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from malletrain.protocol import env
from malletrain.training import report
from malletrain.training.snapshot_file import ForeignSnapshotError, SnapshotError

FOLDER = "malletrain-snapshots"
"""In the folder in which the script runs: the snapshots of runs that name no path."""
FILE = "snapshot.pt"
SNAPSHOT_REMEDY = (
    "two jobs with one path would swap their weights. Give each job a path of its own, or none at "
    "all: Snapshot() finds one by itself."
)
CHECKPOINT_REMEDY = (
    "two jobs with one output folder would go on from each other's weights. Give each job an "
    "output folder of its own."
)


@dataclass(frozen=True)
class Owner:
    """A run, by what tells it from another."""

    job: str
    """Its job; empty outside MalleTrain."""
    script: str
    """File name of its script."""
    arguments: str
    """A hash of the script's arguments."""

    def __str__(self) -> str:
        return f"job {self.job}" if self.job else f"a run of {self.script} outside MalleTrain"


def this_run() -> Owner:
    """The run that this process belongs to."""
    arguments = json.dumps([os.fsencode(value).hex() for value in sys.argv[1:]])
    return Owner(
        os.environ.get(env.JOB, ""),
        os.path.basename(sys.argv[0] if sys.argv else ""),
        hashlib.sha256(arguments.encode()).hexdigest()[:16],
    )


def of(payload: Mapping[str, Any]) -> Owner | None:
    """Whose snapshot it is; None for one that names nobody, as those before this release."""
    named = payload.get("owner")
    if not isinstance(named, dict):
        return None
    return Owner(*(str(named.get(key, "")) for key in ("job", "script", "arguments")))


def named(owner: Owner) -> dict[str, str]:
    """What a snapshot says of its owner."""
    return asdict(owner)


def own_path(owner: Owner) -> str:
    """Where the snapshots of ``owner`` lie when its script names no path: a folder of its own in
    the working folder, by job, script and arguments.
    """
    stem = os.path.splitext(owner.script)[0] or "run"
    folder = f"{owner.job or 'local'}-{stem}-{owner.arguments[:8]}"
    return os.path.abspath(os.path.join(FOLDER, folder, FILE))


def asked_for(resume_from: str | os.PathLike[str] | None) -> str:
    """What may be gone on from beside the run's own: ``resume_from``, else what the submission
    said; empty for nothing.
    """
    if resume_from is not None:
        return os.fspath(resume_from)
    return os.environ.get(env.RESUME_FROM, "")


def path_of(wanted: str, workdir: str = "") -> str:
    """The snapshot that ``wanted``, a job or a path, names.

    Args:
        wanted: see :func:`asked_for`.
        workdir: the folder in which the job runs, when that is not this process's working folder.

    Raises:
        SnapshotError: when a job has none in the default folder of this working folder, or more
            than one.
    """
    folder = os.path.join(workdir, FOLDER)
    if os.sep in wanted or os.path.exists(wanted):
        if not os.path.exists(wanted):
            raise SnapshotError(f"There is no snapshot {wanted} to go on from.")
        return os.path.abspath(wanted)
    found = sorted(glob.glob(os.path.join(glob.escape(folder), f"{glob.escape(wanted)}-*", FILE)))
    if len(found) == 1:
        return os.path.abspath(found[0])
    if found:
        raise SnapshotError(
            f"There are several snapshots of {wanted}: {', '.join(found)}. Name the one to go on "
            "from by its path."
        )
    raise SnapshotError(
        f"There is no snapshot of job {wanted} in {os.path.abspath(folder)}. Name the one to go "
        "on from by its path."
    )


def check(
    payload: Mapping[str, Any],
    name: str,
    mine: Owner,
    wanted: str,
    what: str = "snapshot",
    remedy: str = SNAPSHOT_REMEDY,
) -> None:
    """Refuse a snapshot that belongs to another run.

    Args:
        payload: the snapshot.
        name: its path.
        mine: this run.
        wanted: what was asked for, a job or a path (:func:`asked_for`).
        what: what the file is called in sentences.
        remedy: why two runs must not share it, and what to do.

    Raises:
        SnapshotError: when it is another job's, or that of a job of the same name with another
            script or other arguments, and was not asked for.
    """
    theirs = of(payload)
    if theirs is None or theirs == mine:
        return
    if is_asked_for(theirs, name, wanted):
        report.tell(f"Going on from the {what} of {theirs} in {name}, as asked for.")
        return
    if not (mine.job and theirs.job):
        report.tell(
            f"Going on from {name}, which {theirs} wrote (script {theirs.script}); this run has "
            "another script, other arguments, or is no job."
        )
        return
    whose = str(theirs)
    if theirs.job == mine.job:
        whose = f"an earlier job {theirs.job} ({theirs.script}, with other arguments)"
    also = "" if what != "snapshot" else f', or restore(resume_from="{theirs.job}")'
    raise SnapshotError(
        f"{what.capitalize()} {name} belongs to {whose}, and this is job {mine.job}: {remedy} "
        f"To go on from it: malletrain submit --resume-from {theirs.job} …{also}."
    )


def is_asked_for(theirs: Owner, name: str, wanted: str) -> bool:
    """Whether ``wanted`` is the snapshot of ``theirs`` in the file ``name`` (see :func:`check`)."""
    files = (name, name.partition(".prev")[0])
    return bool(wanted) and (wanted == theirs.job or os.path.abspath(wanted) in files)


def refuse_to_overwrite(
    payload: Mapping[str, Any], path: str, mine: Owner, generation: int
) -> None:
    """Leave a snapshot alone that this process did not expect where it saves.

    Args:
        payload: the snapshot that is there.
        path: its path.
        mine: this run.
        generation: the round that this process belongs to.

    Raises:
        ForeignSnapshotError: when it is another run's.
        SnapshotError: when a later round of this run has saved there.
    """
    theirs = of(payload)
    if theirs and theirs != mine and (theirs.job or mine.job):
        raise ForeignSnapshotError(
            f"Snapshot {path} is that of {theirs}, and is not overwritten. Give each run a path of "
            "its own, or none at all."
        )
    round_there = int(payload.get("generation", 0))
    if round_there > generation:
        raise SnapshotError(
            f"Round {round_there} of this job has saved there, and this process belongs to round "
            f"{generation}: it is left over and its work is not kept."
        )
