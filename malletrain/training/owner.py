"""Whose snapshot a file is, and where a run's own lies when the script names no path.

Decides what names a run (its job, its script, its arguments), which snapshots are another's, and
when another's may be used: only when that was asked for. Standard library only.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
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
_NAMED_FOLDER = re.compile(r"-[0-9a-f]{8}\.([^.]+)$")
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
    daemon: str = ""
    """The name of the job's daemon: job ids begin at j1 with each. Empty outside MalleTrain.
    """

    def __str__(self) -> str:
        return f"job {self.job}" if self.job else f"a run of {self.script} outside MalleTrain"

    def is_same(self, other: Owner) -> bool:
        """Whether both are one run, as far as is known."""
        mine, theirs = (self.job, self.script, self.arguments), other
        return mine == (theirs.job, theirs.script, theirs.arguments) and self.may_share(other)

    def may_share(self, other: Owner) -> bool:
        """Whether both may be jobs of one daemon."""
        return not (self.daemon and other.daemon) or self.daemon == other.daemon


def this_run() -> Owner:
    """The run that this process belongs to."""
    arguments = json.dumps([os.fsencode(value).hex() for value in sys.argv[1:]])
    return Owner(
        os.environ.get(env.JOB, ""),
        os.path.basename(sys.argv[0] if sys.argv else ""),
        hashlib.sha256(arguments.encode()).hexdigest()[:16],
        os.environ.get(env.DAEMON_ID, ""),
    )


def of(payload: Mapping[str, Any]) -> Owner | None:
    """Whose snapshot it is; None for one that names nobody."""
    named = payload.get("owner")
    if not isinstance(named, dict):
        return None
    return Owner(*(str(named.get(key, "")) for key in ("job", "script", "arguments", "daemon")))


def named(owner: Owner) -> dict[str, str]:
    """What a snapshot says of its owner."""
    return asdict(owner)


def own_path(owner: Owner) -> str:
    """Where the snapshots of ``owner`` lie when its script names no path: a folder of its own in
    the working folder, by job, script, arguments and daemon.
    """
    stem = os.path.splitext(owner.script)[0] or "run"
    folder = f"{owner.job or 'local'}-{stem}-{owner.arguments[:8]}"
    if owner.daemon:
        folder = f"{folder}.{owner.daemon}"
    return os.path.abspath(os.path.join(FOLDER, folder, FILE))


def daemon_of_folder(folder: str) -> str:
    """Which daemon's job the default folder ``folder`` is of; empty where it does not say."""
    match = _NAMED_FOLDER.search(os.path.basename(folder))
    return match[1] if match else ""


def resume_source(resume_from: str | os.PathLike[str] | None) -> str:
    """What may be gone on from beside the run's own: ``resume_from``, else what the submission
    said; empty for nothing.
    """
    if resume_from is not None:
        return os.fspath(resume_from)
    return os.environ.get(env.RESUME_FROM, "")


def path_of(requested: str, workdir: str = "", daemon: str = "") -> str:
    """The snapshot that ``requested``, a job or a path, names.

    Args:
        requested: see :func:`resume_source`.
        workdir: the folder in which the job runs, when that is not this process's working folder.
        daemon: whose job it is; empty: any daemon's.

    Raises:
        SnapshotError: when a job has none in the default folder of this working folder, or more
            than one.
    """
    folder = os.path.join(workdir, FOLDER)
    if os.sep in requested or os.path.exists(requested):
        if not os.path.exists(requested):
            raise SnapshotError(f"There is no snapshot {requested} to go on from.")
        return os.path.abspath(requested)
    paths = sorted(
        glob.glob(os.path.join(glob.escape(folder), f"{glob.escape(requested)}-*", FILE))
    )
    others: list[str] = []
    if daemon:
        others = [each for each in paths if daemon_of_folder(os.path.dirname(each)) != daemon]
        paths = [each for each in paths if each not in others]
    if len(paths) == 1:
        return os.path.abspath(paths[0])
    if paths:
        raise SnapshotError(
            f"There are several snapshots of {requested}: {', '.join(paths)}. Name the one to go "
            "on from by its path."
        )
    also = (
        f" ({', '.join(others)}: of a job {requested} of another daemon, "
        "or it does not say of which)"
        if others
        else ""
    )
    raise SnapshotError(
        f"There is no snapshot of job {requested} in {os.path.abspath(folder)}{also}. Name the one "
        "to go on from by its path."
    )


def check(
    payload: Mapping[str, Any],
    name: str,
    mine: Owner,
    requested: str,
    what: str = "snapshot",
    remedy: str = SNAPSHOT_REMEDY,
) -> None:
    """Refuse a snapshot that belongs to another run.

    Args:
        payload: the snapshot.
        name: its path.
        mine: this run.
        requested: what was asked for, a job or a path (:func:`resume_source`).
        what: what the file is called in sentences.
        remedy: why two runs must not share it, and what to do.

    Raises:
        SnapshotError: when it is another job's, or that of a job of the same name with another
            script or other arguments, and was not asked for.
    """
    theirs = of(payload)
    if theirs is None or theirs.is_same(mine):
        return
    if is_resume_source(theirs, name, requested, mine):
        report.tell(f"Going on from the {what} of {theirs} in {name}, as asked for.")
        return
    if not (mine.job and theirs.job):
        report.tell(
            f"Going on from {name}, which {theirs} wrote (script {theirs.script}); this run has "
            "another script, other arguments, or is no job."
        )
        return
    source = theirs.job
    if not theirs.may_share(mine):
        whose, source = f"job {theirs.job} of another daemon ({theirs.daemon})", name
    elif theirs.job == mine.job:
        whose = f"an earlier job {theirs.job} ({theirs.script}, with other arguments)"
    else:
        whose = str(theirs)
    also = "" if what != "snapshot" else f', or restore(resume_from="{source}")'
    raise SnapshotError(
        f"{what.capitalize()} {name} belongs to {whose}, and this is job {mine.job}: {remedy} "
        f"To go on from it: malletrain submit --resume-from {source} …{also}."
    )


def is_resume_source(theirs: Owner, name: str, requested: str, mine: Owner) -> bool:
    """Whether ``requested`` is the snapshot of ``theirs`` in the file ``name`` (see :func:`check`).
    A job's id means the one of this run's daemon.
    """
    if not requested:
        return False
    if requested == theirs.job and theirs.may_share(mine):
        return True
    return os.path.abspath(requested) in (name, name.partition(".prev")[0])


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
    if theirs and not theirs.is_same(mine) and (theirs.job or mine.job):
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
