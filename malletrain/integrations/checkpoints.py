"""Whose checkpoint it is: the record beside a checkpoint of a trainer, and the folder of a trial.

Decides which checkpoints a run may go on from, and which it must not write over. What is in a
checkpoint is the library's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from malletrain.protocol import env
from malletrain.training import owner, report
from malletrain.training.owner import Owner
from malletrain.training.ranks import rank_and_world
from malletrain.training.snapshot_file import ForeignSnapshotError

RECORD = "malletrain.json"
"""In a checkpoint's folder or beside it: whose it is, and what its steps count."""


def read_record(folder: str) -> dict[str, Any]:
    """The record in ``folder``; empty where there is none, or none that can be read."""
    try:
        with open(os.path.join(folder, RECORD)) as file:
            record: dict[str, Any] = json.load(file)
            return record
    except (OSError, ValueError):
        return {}


def write_record(folder: str, run: Owner, facts: Mapping[str, Any]) -> None:
    """Write the record of ``run`` with ``facts``, whole or not at all."""
    write_whole(os.path.join(folder, RECORD), json.dumps({**facts, "owner": owner.named(run)}))


def write_whole(path: str, text: str) -> None:
    """Write a small file so that it is whole or as it was before."""
    with open(path + ".tmp", "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


def is_own(record: Mapping[str, Any], run: Owner) -> bool:
    """Whether ``run`` wrote the checkpoint; True for one that names nobody."""
    theirs = owner.of(record)
    return theirs is None or theirs.is_same(run)


def check_owner(record: Mapping[str, Any], checkpoint: str, run: Owner) -> None:
    """Refuse to go on from a checkpoint of another job that was not asked for.

    Args:
        record: of the checkpoint.
        checkpoint: its path.
        run: this one.

    Raises:
        SnapshotError: whose it is, and what to do.
    """
    owner.check(
        record, checkpoint, run, owner.resume_source(None), "checkpoint", owner.CHECKPOINT_REMEDY
    )


def refuse_to_overwrite(record: Mapping[str, Any], checkpoint: str, run: Owner) -> None:
    """Leave a checkpoint alone that another job has written, unless this run was to begin from it.

    Raises:
        ForeignSnapshotError: when it is another job's.
    """
    theirs = owner.of(record)
    if theirs is None or theirs.is_same(run) or not (theirs.job and run.job):
        return
    requested = owner.resume_source(None)
    beside = os.path.dirname(os.path.abspath(requested)) == os.path.dirname(checkpoint)
    if requested and (beside or owner.is_resume_source(theirs, checkpoint, requested, run)):
        return
    raise ForeignSnapshotError(
        f"Checkpoint {checkpoint} belongs to {theirs}, and is not overwritten by job {run.job}. "
        "Give each job an output folder of its own."
    )


def own_folder(folder: str | os.PathLike[str]) -> str:
    """The output folder of this run, absolute: ``folder``, or in a trial of a sweep whose arguments
    do not tell its trials' folders apart, a folder of the trial's own in it.
    """
    path = os.path.abspath(os.fspath(folder))
    trial = os.environ.get(env.TRIAL_FOLDER, "")
    if not trial or os.path.basename(path) == trial:
        return path
    own = os.path.join(path, trial)
    if rank_and_world()[0] == 0:
        report.tell(
            f"Checkpoints of this trial go to {own}: each trial of a sweep has a folder of its "
            "own. To name it yourself, write {trial} into the sweep's arguments.",
            once=f"trial folder {own}",
        )
    return own
