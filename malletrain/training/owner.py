"""Identifies the run that owns a snapshot, and the default path of a run's snapshots. Standard
library only.

A run is identified by its job, its script and its arguments (:class:`RunIdentity`). :func:`check`
decides which snapshots belong to another run. Such a snapshot is used only on request.

:func:`owner_in` reads the owner of a snapshot without torch, without running code of the snapshot
and without its tensors, for commands that copy, export or delete snapshots.

:func:`warn_of_dated_folder` recognizes a path in a folder that hydra names after the time of each
start. With hydra's ``job.chdir`` the working folder is such a folder, so relative paths and the
default path are below it. The next round gets another folder and does not find the snapshot.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from malletrain.protocol import env
from malletrain.protocol.bounds import JOB_ID
from malletrain.training import report
from malletrain.training.snapshot_file import ForeignSnapshotError, SnapshotError

_RECORD = "data.pkl"
"""Name of the record of torch.save with everything but tensors."""
FOLDER = "malletrain-snapshots"
"""Folder, in the working folder of the script, for the snapshots of runs whose script sets no
path.
"""
FILE = "snapshot.pt"
SNAPSHOT_REMEDY = (
    "two jobs with one path would swap their weights. Give each job a path of its own, or none at "
    "all: Snapshot() uses a folder of the job."
)
CHECKPOINT_REMEDY = (
    "two jobs with one output folder would go on from each other's weights. Give each job an "
    "output folder of its own."
)
_REMEDIES = (
    ("run", "dir", "hydra.run.dir='outputs/${oc.env:MALLETRAIN_JOB}'"),
    ("sweep", "dir", "hydra.sweep.dir='multirun/${oc.env:MALLETRAIN_JOB}'"),
    ("sweep", "subdir", "hydra.sweep.subdir='${hydra.job.num}'"),
)
"""(section, key, argument) of hydra's configuration: what to set instead of a name with a time."""


class _Inert(dict[Any, Any]):
    """Placeholder for every class and every object in a snapshot that is not plain data."""

    def __new__(cls, *args: Any, **named: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__()

    def __call__(self, *args: Any, **named: Any) -> _Inert:
        return _Inert()

    def __setstate__(self, state: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """As a list has it."""

    def extend(self, values: Any) -> None:
        """As a list has it."""

    def add(self, value: Any) -> None:
        """As a set has it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Inert

    def persistent_load(self, pid: Any) -> Any:
        return _Inert()


def owner_in(path: str) -> RunIdentity | None:
    """Return the owner of the snapshot in the file ``path``; None if it cannot be read or names
    none.
    """
    payload = plain_payload(path)
    return None if payload is None else owner_of(payload)


def plain_payload(path: str) -> dict[str, Any] | None:
    """Return the plain data of the snapshot in the file ``path``, without its tensors and objects;
    None if it cannot be read as a snapshot.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            record = next(n for n in archive.namelist() if n.rpartition("/")[2] == _RECORD)
            with archive.open(record) as file:
                payload = _Plain(file).load()
    except Exception:  # absent, damaged, or not a snapshot
        return None
    if not isinstance(payload, dict) or "malletrain_snapshot" not in payload:
        return None
    return payload


_FOLDER_OF_DAEMON = re.compile(r"-[0-9a-f]{8}\.([^.]+)$")


@dataclass(frozen=True)
class RunIdentity:
    """Identity of a run."""

    job: str
    """Id of its job; empty outside MalleTrain."""
    script: str
    """File name of its script."""
    arguments: str
    """A hash of the script's arguments."""
    daemon: str = ""
    """Name of the job's daemon, because each daemon numbers its jobs from j1. Empty outside
    MalleTrain.
    """

    def __str__(self) -> str:
        return f"job {self.job}" if self.job else f"a run of {self.script} outside MalleTrain"

    def is_same(self, other: RunIdentity) -> bool:
        """Return whether both are the same run, as far as known."""
        own_identity, theirs = (self.job, self.script, self.arguments), other
        return own_identity == (theirs.job, theirs.script, theirs.arguments) and self.may_share(
            other
        )

    def may_share(self, other: RunIdentity) -> bool:
        """Return whether both can be jobs of the same daemon."""
        return not (self.daemon and other.daemon) or self.daemon == other.daemon


def this_run() -> RunIdentity:
    """Return the run of this process."""
    arguments = json.dumps([os.fsencode(value).hex() for value in sys.argv[1:]])
    return RunIdentity(
        os.environ.get(env.JOB, ""),
        os.path.basename(sys.argv[0] if sys.argv else ""),
        hashlib.sha256(arguments.encode()).hexdigest()[:16],
        os.environ.get(env.DAEMON_ID, ""),
    )


def owner_of(payload: Mapping[str, Any]) -> RunIdentity | None:
    """Return the owner of a snapshot; None if it names none."""
    record = payload.get("owner")
    if not isinstance(record, dict):
        return None
    return RunIdentity(
        *(str(record.get(key, "")) for key in ("job", "script", "arguments", "daemon"))
    )


def to_record(owner: RunIdentity) -> dict[str, str]:
    """Return the entry for ``owner`` in a snapshot."""
    return asdict(owner)


def own_path(owner: RunIdentity) -> str:
    """Return the default path for the snapshots of ``owner``: in a folder below the working folder
    that is named by job, script, arguments and daemon.
    """
    stem = os.path.splitext(owner.script)[0] or "run"
    folder = f"{owner.job or 'local'}-{stem}-{owner.arguments[:8]}"
    if owner.daemon:
        folder = f"{folder}.{owner.daemon}"
    return os.path.abspath(os.path.join(FOLDER, folder, FILE))


def daemon_of_folder(folder: str) -> str:
    """Return the daemon in the name of the default folder ``folder``; empty if it has none."""
    match = _FOLDER_OF_DAEMON.search(os.path.basename(folder))
    return match[1] if match else ""


def resume_source(resume_from: str | os.PathLike[str] | None) -> str:
    """Return the job or path from which the run may start: ``resume_from``, else the value of
    ``malletrain submit --resume-from``; empty for none.
    """
    if resume_from is not None:
        return os.fspath(resume_from)
    return os.environ.get(env.RESUME_FROM, "")


def path_of(requested: str, workdir: str = "", daemon: str = "") -> str:
    """Return the path of a requested snapshot.

    Args:
        requested: a job id or a path (:func:`resume_source`).
        workdir: working folder of the job. Default: that of this process.
        daemon: name of the job's daemon; empty for any daemon.

    Raises:
        SnapshotError: the path does not exist, or the job has no snapshot, or several, in the
            default folder.
    """
    # A folder with a job's id as its name is not meant: `malletrain cp j3 j3` makes one.
    is_other_name = os.path.exists(requested) and not JOB_ID.fullmatch(requested)
    if os.sep in requested or os.path.isfile(requested) or is_other_name:
        if not os.path.exists(requested):
            raise SnapshotError(f"There is no snapshot {requested} to go on from.")
        return os.path.abspath(requested)
    return path_of_job(requested, workdir, daemon)


def path_of_job(job: str, workdir: str = "", daemon: str = "") -> str:
    """Return the path of the snapshot of a job in its default folder, whatever files or folders
    have the job's id as their name.

    Args:
        job: id of the job.
        workdir: working folder of the job. Default: that of this process.
        daemon: name of the job's daemon; empty for any daemon.

    Raises:
        SnapshotError: the job has no snapshot, or several, in the default folder.
    """
    folder = os.path.join(workdir, FOLDER)
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), f"{glob.escape(job)}-*", FILE)))
    paths_of_others: list[str] = []
    if daemon:
        paths_of_others = [
            candidate
            for candidate in paths
            if daemon_of_folder(os.path.dirname(candidate)) != daemon
        ]
        paths = [candidate for candidate in paths if candidate not in paths_of_others]
    if len(paths) == 1:
        return os.path.abspath(paths[0])
    if paths:
        raise SnapshotError(
            f"There are several snapshots of {job}: {', '.join(paths)}. Name one by its path."
        )
    note = (
        f" ({', '.join(paths_of_others)}: of a job {job} of another daemon, "
        "or it does not say of which)"
        if paths_of_others
        else ""
    )
    raise SnapshotError(
        f"There is no snapshot of job {job} in {os.path.abspath(folder)}{note}. Name one by its "
        "path."
    )


def check(
    payload: Mapping[str, Any],
    name: str,
    mine: RunIdentity,
    requested: str,
    what: str = "snapshot",
    remedy: str = SNAPSHOT_REMEDY,
) -> None:
    """Refuse a snapshot that belongs to another run.

    Args:
        payload: the snapshot.
        name: its path.
        mine: this run.
        requested: the requested job or path (:func:`resume_source`).
        what: noun for the file, for messages.
        remedy: text for messages: why two runs must not share it, and what to do.

    Raises:
        SnapshotError: it belongs to another job, or to a job with the same id and another script or
            other arguments, and was not requested.
    """
    recorded = owner_of(payload)
    if recorded is None or recorded.is_same(mine):
        return
    if is_resume_source(recorded, name, requested, mine):
        report.tell(f"Going on from the {what} of {recorded} in {name}, as requested.")
        return
    if not (mine.job and recorded.job):
        report.tell(
            f"Going on from {name}, which {recorded} wrote (script {recorded.script}); this run "
            "has another script, other arguments, or is no job."
        )
        return
    source = recorded.job
    if not recorded.may_share(mine):
        whose, source = f"job {recorded.job} of another daemon ({recorded.daemon})", name
    elif recorded.job == mine.job:
        whose = f"an earlier job {recorded.job} ({recorded.script}, with other arguments)"
    else:
        whose = str(recorded)
    hint = "" if what != "snapshot" else f', or restore(resume_from="{source}")'
    raise SnapshotError(
        f"{what.capitalize()} {name} belongs to {whose}, and this is job {mine.job}: {remedy} "
        f"To go on from it: malletrain submit --resume-from {source} …{hint}."
    )


def is_resume_source(theirs: RunIdentity, name: str, requested: str, mine: RunIdentity) -> bool:
    """Return whether a snapshot was requested. A job id means a job of this run's daemon.

    Args:
        theirs: owner of the snapshot.
        name: its path.
        requested: the requested job or path.
        mine: this run.
    """
    if not requested:
        return False
    if requested == theirs.job and theirs.may_share(mine):
        return True
    return os.path.abspath(requested) in (name, name.partition(".prev")[0])


def refuse_to_overwrite(
    payload: Mapping[str, Any], path: str, mine: RunIdentity, generation: int
) -> None:
    """Refuse to overwrite an unexpected snapshot.

    Args:
        payload: the snapshot on disk.
        path: its path.
        mine: this run.
        generation: number of the round of this process.

    Raises:
        ForeignSnapshotError: it belongs to another run.
        SnapshotError: a later round of this run has saved it.
    """
    recorded = owner_of(payload)
    if recorded and not recorded.is_same(mine) and (recorded.job or mine.job):
        raise ForeignSnapshotError(
            f"Snapshot {path} is that of {recorded}, and is not overwritten. Give each run a path "
            "of its own, or none at all."
        )
    round_there = int(payload.get("generation", 0))
    if round_there > generation:
        raise SnapshotError(
            f"Round {round_there} of this job has saved to {path}, and this process is left over "
            f"from round {generation}. Its snapshot is not written."
        )


def warn_of_dated_folder(path: str) -> None:
    """Print a message, once, if a later round of this job does not find the snapshot because its
    folder is named after the time. Call it on rank 0. Never raises.

    Args:
        path: the snapshot's absolute path.
    """
    if env.JOB not in os.environ or env.GENERATION not in os.environ or env.TASK in os.environ:
        return
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None:
        return
    try:
        folder, remedies = _dated_folder(module)
        is_below = _is_below(path, folder) and _is_below(os.getcwd(), folder)
    except Exception:  # a release of hydra that keeps its configuration elsewhere
        return
    if not (remedies and is_below):
        return
    report.tell(
        f"hydra puts the time of the start into the name of the folder {folder}. A round of this "
        f"job that starts at another time gets another folder, does not find the snapshot {path} "
        f"and begins anew. To keep the snapshots and the script's other files in one folder, run "
        f"the script with {' '.join(remedies)}, or pass Snapshot an absolute path elsewhere.",
        once="hydra folder",
    )


def _dated_folder(module: Any) -> tuple[str, list[str]]:
    """Return hydra's folder of this process, and what to set so that its name has no time; empty
    if it has none.
    """
    if not module.HydraConfig.initialized():
        return "", []
    config = module.HydraConfig.get()
    section = "sweep" if "MULTIRUN" in str(config.mode) else "run"
    # Unresolved: a folder that the user has named after a date has the same name in each round.
    names = sys.modules["omegaconf"].OmegaConf.to_container(config[section], resolve=False)
    remedies = [
        argument
        for of, key, argument in _REMEDIES
        if of == section and "${now:" in str(names.get(key, ""))
    ]
    return str(config.runtime.output_dir), remedies


def _is_below(path: str, folder: str) -> bool:
    real, real_folder = (os.path.realpath(os.path.abspath(each)) for each in (path, folder))
    return os.path.commonpath([real, real_folder]) == real_folder
