"""The job of a trial, from the sweep's description: what ``malletrain submit`` would make of it,
and where its snapshot lies.

Decides what each trial's job has of its own: name, key, arguments. Whether it can be a job is
decided in :mod:`malletrain.submission`.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from optuna.trial import FrozenTrial, TrialState

from malletrain.protocol import env
from malletrain.protocol.messages import JobSpec
from malletrain.submission.error import SpecError
from malletrain.submission.output_folders import OPTION, output_folders
from malletrain.submission.snapshot_paths import snapshot_paths
from malletrain.submission.software import SoftwareOptions
from malletrain.submission.spec import build
from malletrain.sweep import ledger as book
from malletrain.sweep.ledger import Ledger
from malletrain.sweep.search import own
from malletrain.sweep.space import Value, trial_arguments
from malletrain.sweep.spec import Sweep, SweepError
from malletrain.training.owner import FILE, FOLDER, Owner, daemon_of_folder
from malletrain.training.snapshot_file import close_epoch
from malletrain.training.snapshot_records import owner_in

PLACE = "{trial}"
SETTLED_S = 120.0
"""After so long nobody saves any more for a job that has ended."""
OPTIONS = ("--snapshot", "--checkpoint", "--ckpt")
"""Options of a script that say where its snapshot goes."""


def job_of(ledger: Ledger, number: int, values: dict[str, Value]) -> JobSpec:
    """The job of a trial. Raises SweepError where it cannot be one."""
    spec = build_job(ledger.sweep, ledger.job_name(number), values, number)
    return msgspec.structs.replace(spec, key=ledger.key(number), sweep=ledger.entry)


def build_job(sweep: Sweep, name: str, values: dict[str, Value], number: int) -> JobSpec:
    """A job with these values. Raises SweepError where it cannot be one."""
    job = sweep.job
    software = SoftwareOptions(
        module=tuple(job.module), conda=job.conda, venv=job.venv, container=job.container
    )
    try:
        spec = build(
            str(job.script),
            trial_arguments(job.args, values, number),
            name=name,
            nodes=job.nodes,
            nproc_per_node=job.nproc_per_node,
            weight=job.weight,
            goal=job.goal,
            setup=job.setup,
            env=[f"{k}={v}" for k, v in job.env.items()],
            workdir=str(job.workdir) if job.workdir is not None else None,
            launcher=job.launcher,
            live=job.live,
            profile=job.profile != "off",
            profile_key=f"sweep {sweep.sweep.name}" if job.profile == "shared" else None,
            model_size=_model_size(sweep, values),
            software=software,
        )
    except SpecError as error:
        raise SweepError(f"The trials of {sweep.sweep.name} cannot be jobs: {error}") from None
    variables = {env.TRIAL: str(number)}
    if not _names_folders(job.args):
        variables[env.TRIAL_FOLDER] = f"trial-{number}"
    return msgspec.structs.replace(spec, env={**variables, **spec.env})


def _names_folders(args: Sequence[str]) -> bool:
    """Whether the arguments give each trial a folder of its own: ``{trial}`` in the name of one, or
    as the value of an option that names one. (``--seed {trial}`` does not.)
    """
    for before, arg in zip(("", *args), args, strict=False):
        option, equals, value = arg.partition("=")
        path, option = (value, option) if equals else (arg, before)
        if PLACE in path and (path != PLACE or OPTION.fullmatch(option) or option in OPTIONS):
            return True
    return False


def _model_size(sweep: Sweep, values: dict[str, Value]) -> str | None:
    """How large the trial's model is: PARAMETERS[,FLOPS]. None where its owner does not know."""
    if not sweep.job.model_size:
        return None
    try:
        size = own(sweep.job.model_size, sweep.job.workdir, values)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise SweepError(f"{sweep.job.model_size} does not say a model's size: {error}") from None
    if size is None:
        return None
    return ",".join(map(str, size if isinstance(size, tuple | list) else (size,)))


def check(sweep: Sweep) -> list[str]:
    """Make the jobs of two trials, of different values where there are two.

    Returns:
        Sentences about what all trials would write to.

    Raises:
        SweepError: no trial could be a job.
    """
    ends = sweep.parameters.items()
    first = {name: p.choices[0] if p.choices else p.low for name, p in ends}
    last = {name: p.choices[-1] if p.choices else p.high for name, p in ends}
    jobs = [
        build_job(sweep, f"{sweep.sweep.name}-{number}", values, number)
        for number, values in enumerate((first, last))
    ]
    return shared_places(*jobs)


def shared_places(one: JobSpec, other: JobSpec) -> list[str]:
    """What to say about snapshots and output folders that two trials have in common."""
    snapshots, others = (snapshot_paths(j.script, j.args, j.workdir) for j in (one, other))
    warnings = [
        f"Warning: all trials save to the snapshot {path}, and a trial refuses that of another. "
        "Write {trial} into its path, or name none: Snapshot() finds one by itself."
        for path in sorted(snapshots & others)
    ]
    folders, theirs = (output_folders(j.script, j.args, j.workdir) for j in (one, other))
    for path in sorted(folders & theirs - snapshots):
        if env.TRIAL_FOLDER in one.env:
            warnings.append(
                f"All trials have the output folder {path}. With MalleTrain's callbacks the "
                f"checkpoints of each go to a folder of its own there ({one.env[env.TRIAL_FOLDER]}"
                f", {other.env[env.TRIAL_FOLDER]}, …); what the script writes itself lies side by "
                "side. To tell the folders apart write {trial} into [job] args."
            )
        else:
            warnings.append(
                f"Warning: all trials have the output folder {path}, and a trial refuses the "
                "checkpoints of another. Write {trial} into its name."
            )
    return warnings


# --- snapshots ---


def snapshots(ledger: Ledger, trial: FrozenTrial) -> list[Path]:
    """Files and folders with the trial's snapshot that are there: the folder of its job below the
    working directory, and what an argument with ``{trial}`` in it names. Only what says that it is
    of the trial's job at its daemon, and belongs to this user: ids of jobs begin anew with every
    daemon, and several sweeps may name one path.
    """
    name, daemon = trial.user_attrs.get(book.JOB), trial.user_attrs.get(book.DAEMON)
    if not name or not daemon:
        return []
    workdir = Path(ledger.sweep.job.workdir or os.getcwd())
    mine = Owner(name, "", "", daemon)
    paths = [
        folder
        for folder in sorted((workdir / FOLDER).glob(f"{glob.escape(name)}-*"))
        if daemon_of_folder(folder.name) == daemon and _is_of(folder / FILE, mine, unsaid=True)
    ]
    for path in _named(ledger, trial.number):
        place = workdir / os.path.expanduser(path)
        escaped = glob.escape(place.name)
        files = [place, *sorted(place.parent.glob(f"{escaped}.prev*"))]
        own = [file for file in files if file.is_file() and _is_of(file, mine, unsaid=False)]
        paths += own
        if own and not any(file.is_file() for file in files if file not in own):
            paths += sorted(place.parent.glob(f"{escaped}.shards"))
            paths += sorted(place.parent.glob(f"{escaped}.open-epoch"))
    return [each for each in paths if each.stat().st_uid == os.geteuid()]


def _is_of(file: Path, mine: Owner, unsaid: bool) -> bool:
    """Whether the snapshot is that job's; ``unsaid``: what is meant where it does not say."""
    theirs = owner_in(str(file))
    if theirs is None or not theirs.daemon:
        return unsaid
    return (theirs.job, theirs.daemon) == (mine.job, mine.daemon)


def _named(ledger: Ledger, number: int) -> Iterator[str]:
    args = ledger.sweep.job.args
    for before, arg in zip(("", *args), args, strict=False):
        option, equals, value = arg.partition("=")
        path = value if equals and option in OPTIONS else arg if before in OPTIONS else ""
        if PLACE in path and not path.startswith("-"):
            yield path.replace(PLACE, str(number))


def best_snapshot(ledger: Ledger) -> Path | None:
    """The best trial's snapshot; None where it left none."""
    for trial in ledger.best()[:1]:
        for place in snapshots(ledger, trial):
            file = place / FILE if place.is_dir() else place
            if file.exists():
                return file
    return None


def delete_losers(ledger: Ledger, now: float) -> list[int]:
    """Delete the snapshots of ended trials that are not among the best; the trials that had one.
    Those that go on are left alone, and those that failed: their owner may want to look.

    Workers of a job that was cancelled may save once more before they are gone, so a trial is
    looked at again for a while.
    """
    best = {t.number for t in ledger.best(ledger.sweep.sweep.keep)}
    gone = set(ledger.gone)
    deleted, settled = [], []
    for trial in ledger.trials(TrialState.COMPLETE, TrialState.PRUNED):
        if trial.number in best or trial.number in gone:
            continue
        places = snapshots(ledger, trial)
        for place in places:
            if place.is_dir():
                shutil.rmtree(place, ignore_errors=True)
            else:
                place.unlink(missing_ok=True)
                close_epoch(str(place))  # its mark beside it goes too
        ended = trial.datetime_complete
        if places:
            deleted.append(trial.number)
        elif ended is not None and now - ended.timestamp() > SETTLED_S:
            settled.append(trial.number)
    if settled:
        ledger.forget_snapshots(settled)
    return deleted
