"""What MalleTrain stores beside a trainer's checkpoint. The library decides the content of the
checkpoint itself.

The record names the owner of a checkpoint. Decides from which checkpoints a run may resume, and
which it must not overwrite.

The states of the random generators serve a change of the number of ranks. Lightning saves no
generators. Trainer and Accelerate save a file for each rank, so that a rank of a larger round finds
none. Such a rank would start at the script's seed again and draw, after each change of nodes, the
random numbers of the beginning of the training: the same dropout masks, noise and masked tokens.
:class:`RandomStates` decides from which state such a rank continues: from that of rank 0, or from
one of its own if the script seeds its ranks differently
(:class:`malletrain.training.rng.RankSeeds`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from malletrain.protocol import env
from malletrain.training import owner, report, rng
from malletrain.training.owner import RunIdentity
from malletrain.training.ranks import rank_and_world
from malletrain.training.snapshot_file import ForeignSnapshotError

RECORD = "malletrain.json"
"""Name of the record in or beside a checkpoint: its owner, and the sizes that its steps are based
on.
"""
FILE = "malletrain-rng.pt"
"""Name of the file, in a checkpoint's folder, with the states of rank 0."""


def read_record(folder: str) -> dict[str, Any]:
    """Return the record in ``folder``; empty if there is none or it is unreadable."""
    try:
        with open(os.path.join(folder, RECORD)) as file:
            record: dict[str, Any] = json.load(file)
            return record
    except (OSError, ValueError):
        return {}


def is_whole(record: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint is complete by its ``record``. Records of older releases do not
    say so and count as complete; an empty record counts as incomplete.
    """
    return bool(record.get("whole", record))


def has_rng_state(args: Any, checkpoint: str | None) -> bool:
    """Return whether a checkpoint of Trainer has the file from which it restores the random
    generators of this rank. ``args``: Trainer's arguments.
    """
    rank = f"_{args.process_index}" if args.world_size > 1 else ""
    return os.path.exists(os.path.join(checkpoint or "", f"rng_state{rank}.pth"))


def is_of_job(record: Mapping[str, Any], job: str, run: RunIdentity) -> bool:
    """Return whether a checkpoint belongs to ``job``, from which ``run`` may resume."""
    recorded = owner.owner_of(record)
    return recorded is not None and bool(job) and recorded.job == job and recorded.may_share(run)


def write_record(folder: str, run: RunIdentity, facts: Mapping[str, Any]) -> None:
    """Write the record of a checkpoint, atomically.

    Args:
        folder: folder of the record.
        run: the run that owns the checkpoint.
        facts: other entries of the record.
    """
    write_whole(os.path.join(folder, RECORD), json.dumps({**facts, "owner": owner.to_record(run)}))


def write_whole(path: str, text: str) -> None:
    """Write a small file atomically."""
    with open(path + ".tmp", "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


def is_own(record: Mapping[str, Any], run: RunIdentity) -> bool:
    """Return whether ``run`` wrote the checkpoint; True if the record names no owner."""
    recorded = owner.owner_of(record)
    return recorded is None or recorded.is_same(run)


def check_owner(record: Mapping[str, Any], checkpoint: str, run: RunIdentity) -> None:
    """Refuse to resume from a checkpoint of another job that was not requested.

    Args:
        record: record of the checkpoint.
        checkpoint: its path.
        run: this run.

    Raises:
        SnapshotError: it belongs to another job; the message names the job and what to do.
    """
    owner.check(
        record, checkpoint, run, owner.resume_source(None), "checkpoint", owner.CHECKPOINT_REMEDY
    )


def refuse_to_overwrite(record: Mapping[str, Any], checkpoint: str, run: RunIdentity) -> None:
    """Refuse to overwrite a checkpoint of another job, unless this run was requested to start from
    it.

    Args:
        record: record of the checkpoint.
        checkpoint: its path.
        run: this run.

    Raises:
        ForeignSnapshotError: it belongs to another job.
    """
    recorded = owner.owner_of(record)
    if recorded is None or recorded.is_same(run) or not (recorded.job and run.job):
        return
    requested = owner.resume_source(None)
    beside = os.path.dirname(os.path.abspath(requested)) == os.path.dirname(checkpoint)
    if requested and (beside or owner.is_resume_source(recorded, checkpoint, requested, run)):
        return
    raise ForeignSnapshotError(
        f"Checkpoint {checkpoint} belongs to {recorded}, and is not overwritten by job {run.job}. "
        "Give each job an output folder of its own."
    )


def own_folder(folder: str | os.PathLike[str]) -> str:
    """Return the absolute output folder of this run: ``folder``, or a subfolder for the trial if
    the arguments of a sweep do not give each trial its own folder.
    """
    path = os.path.abspath(os.fspath(folder))
    trial = os.environ.get(env.TRIAL_FOLDER, "")
    if not trial or os.path.basename(path) == trial:
        return path
    trial_folder = os.path.join(path, trial)
    if rank_and_world()[0] == 0:
        report.tell(
            f"Checkpoints of this trial go to {trial_folder}: each trial of a sweep has a folder "
            "of its own. To name it yourself, write {trial} into the sweep's arguments.",
            once=f"trial folder {trial_folder}",
        )
    return trial_folder


def save_states(folder: str) -> None:
    """Write the present states to ``folder``. Call it on rank 0 only."""
    path = os.path.join(folder, FILE)
    torch.save(rng.state(), path + ".tmp")
    os.replace(path + ".tmp", path)


def read_states(folder: str) -> dict[str, Any]:
    """Return the states in ``folder``; empty if there are none."""
    path = os.path.join(folder, FILE)
    if not os.path.exists(path):  # of an earlier release, or of the library alone
        return {}
    states: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return states


class RandomStates:
    """The states from which this rank continues. Created on every rank, before the library loads
    the states of its own. Collective.

    Args:
        of_rank_0: the states of rank 0 at the checkpoint (:func:`malletrain.training.rng.state`);
            empty if unknown. Then nothing is loaded.
        from_rank_0: a broadcast: returns on every rank the text that rank 0 passes to it.
    """

    def __init__(self, of_rank_0: dict[str, Any], from_rank_0: Callable[[str], str]) -> None:
        seeds, now = rng.RankSeeds(from_rank_0), rng.state()
        self._states = of_rank_0
        if of_rank_0:
            rng.load(of_rank_0)
            seeds.separate()
            self._states = rng.state()
            rng.load(now)

    def load(self) -> None:
        """Set the generators to these states."""
        rng.load(self._states)

    def load_for_loader(self, steps: int) -> None:
        """Set the generators to states that follow from these, for a loader that is iterated in the
        middle of an epoch: its workers must not repeat the numbers of the run. Call :meth:`load`
        after it. ``steps``: number of steps of the run.
        """
        if self._states:
            rng.load(self._states)
            rng.branch(steps)
