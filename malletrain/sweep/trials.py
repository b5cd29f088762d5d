"""The job of a trial, built from the sweep's description as by ``malletrain submit``, and the
location of its snapshot.

Decides the name, key and arguments of each trial's job. :mod:`malletrain.submission` decides
whether it is valid.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from optuna.trial import FrozenTrial, TrialState

from malletrain.protocol import env
from malletrain.protocol.messages import JobSpec
from malletrain.submission.error import SpecError
from malletrain.submission.options import ScriptOptions
from malletrain.submission.resuming import snapshot_paths
from malletrain.submission.script import OPTION, options_of_type_bool, output_folders
from malletrain.submission.software import SoftwareOptions
from malletrain.submission.spec import build
from malletrain.sweep import ledger as book
from malletrain.sweep.ledger import Ledger
from malletrain.sweep.search import own, sampler_warnings
from malletrain.sweep.space import Value, trial_arguments
from malletrain.sweep.spec import Sweep, SweepError
from malletrain.training.owner import FILE, FOLDER, RunIdentity, daemon_of_folder, owner_in
from malletrain.training.snapshot_file import close_epoch

PLACE = "{trial}"
MAX_LATE_SAVE_S = 120.0
"""Time after the end of a job after which no process saves for it, seconds."""
OPTIONS = ("--snapshot", "--checkpoint", "--ckpt")
"""Options of a script with the path of its snapshot."""
CONFIG_OPTIONS = ("config", "cfg", "conf", "config-file", "config_file")
"""Names of options of a script with the path of its configuration file."""
MAX_TEXT_BYTES = 16 * 1024 * 1024
"""Number of bytes of a script or configuration file that its digest covers."""


def job_of(ledger: Ledger, number: int, values: dict[str, Value]) -> JobSpec:
    """Return the job of a trial. Raises SweepError if it is not valid."""
    spec = build_job(ledger.sweep, ledger.job_name(number), values, number)
    return msgspec.structs.replace(spec, key=ledger.key(number), sweep=ledger.entry)


def build_job(sweep: Sweep, name: str, values: dict[str, Value], number: int) -> JobSpec:
    """Return a job with these values. Raises SweepError if it is not valid."""
    job = sweep.job
    software = SoftwareOptions(
        module=tuple(job.module), conda=job.conda, venv=job.venv, container=job.container
    )
    try:
        options = ScriptOptions(
            name=name,
            nodes=job.nodes,
            slots=job.slots,
            gpus=job.gpus,
            kind=job.kind,
            nproc_per_node=job.nproc_per_node,
            threads=job.threads,
            loader_workers=job.loader_workers,
            data_memory=job.data_memory,
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
        spec = build(str(job.script), trial_arguments(job.args, values, number), options)
    except SpecError as error:
        raise SweepError(f"The trials of {sweep.sweep.name} cannot be jobs: {error}") from None
    variables = {env.TRIAL: str(number)}
    if not _names_folders(job.args):
        variables[env.TRIAL_FOLDER] = f"trial-{number}"
    return msgspec.structs.replace(spec, env={**variables, **spec.env})


def _names_folders(args: Sequence[str]) -> bool:
    """Return whether the arguments give each trial a separate folder: ``{trial}`` is part of a
    path, or the value of an option for a folder (unlike ``--seed {trial}``).
    """
    for before, arg in zip(("", *args), args, strict=False):
        option, equals, value = arg.partition("=")
        path, option = (value, option) if equals else (arg, before)
        if PLACE in path and (path != PLACE or OPTION.fullmatch(option) or option in OPTIONS):
            return True
    return False


def _model_size(sweep: Sweep, values: dict[str, Value]) -> str | None:
    """Return the size of the trial's model, PARAMETERS[,FLOPS]; None if the owner's function does
    not know it."""
    if not sweep.job.model_size:
        return None
    try:
        size = own(sweep.job.model_size, sweep.job.workdir, values)
    except Exception as error:  # it is the owner's function
        why = f"{type(error).__name__}: {error}"
        raise SweepError(f"{sweep.job.model_size} does not say a model's size: {why}") from error
    if size is None:
        return None
    return ",".join(map(str, size if isinstance(size, tuple | list) else (size,)))


def check(sweep: Sweep) -> list[str]:
    """Build the jobs of two trials, with different values if possible.

    Returns:
        Notes and warnings about the direction, the sampler, options that are true in all trials,
            and paths to which all trials would write.

    Raises:
        SweepError: the trials' jobs are not valid.
    """
    ends = sweep.parameters.items()
    first = {name: p.choices[0] if p.choices else p.low for name, p in ends}
    last = {name: p.choices[-1] if p.choices else p.high for name, p in ends}
    jobs = [
        build_job(sweep, f"{sweep.sweep.name}-{number}", values, number)
        for number, values in enumerate((first, last))
    ]
    return [
        *_usual_direction(sweep),
        *sampler_warnings(sweep),
        *always_true(sweep, *jobs),
        *shared_places(*jobs),
    ]


def _usual_direction(sweep: Sweep) -> list[str]:
    """Return a note on the direction if the description names none."""
    if "direction" in sweep.sweep.model_fields_set:
        return []
    metrics = sweep.sweep.metrics
    if len(metrics) > 1:
        return [
            f"The smallest values of {' and '.join(metrics)} are the best, because the sweep names "
            "no direction. If the largest are, write a direction for each, such as direction = "
            f"{json.dumps(['maximize', *['minimize'] * (len(metrics) - 1)])}."
        ]
    return [
        f"The smallest {metrics[0]} is the best, because the sweep names no direction. If the "
        'largest is, write direction = "maximize".'
    ]


def always_true(sweep: Sweep, one: JobSpec, other: JobSpec) -> list[str]:
    """Return warnings about options whose values differ between two trials of a sweep, and which
    the script reads as true in all of its trials.
    """
    values, others = (_option_values(job.args) for job in (one, other))
    differing = {option for option, value in values.items() if others.get(option) != value}
    # An empty value is the only one that is false.
    empty = {name: "" if "" in p.choices else 1 for name, p in sweep.parameters.items()}
    with_empty = _option_values(trial_arguments(sweep.job.args, empty, 0))
    return [
        f"Warning: {one.script} reads {option} with type=bool, for which every text is true, also "
        "false and 0: it would be true in all trials. Read it with type=lambda text: text.lower() "
        "in ('true', '1')."
        for option in sorted(differing & options_of_type_bool(one.script))
        if with_empty.get(option)
    ]


def text_digests(sweep: Sweep) -> dict[str, str]:
    """Return path → digest of the script and of the configuration files that its arguments name.
    Those that cannot be read now are left out.
    """
    workdir, digests = Path(sweep.job.workdir or os.getcwd()), {}
    options = _option_values(sweep.job.args)
    configs = [options.get(f"{dashes}{name}") for name in CONFIG_OPTIONS for dashes in ("-", "--")]
    for path in (sweep.job.script, *filter(None, configs)):
        place = workdir / os.path.expanduser(str(path))
        with contextlib.suppress(OSError, ValueError):
            if place.is_file():
                with place.open("rb") as file:
                    text = file.read(MAX_TEXT_BYTES)
                digests[str(place)] = hashlib.sha256(text).hexdigest()
    return digests


def _option_values(args: Sequence[str]) -> dict[str, str]:
    """Return option → its value."""
    values = {}
    for arg, after in zip(args, (*args[1:], ""), strict=False):
        option, equals, value = arg.partition("=")
        if arg.startswith("-"):
            values[option] = value if equals else after
    return values


def shared_places(one: JobSpec, other: JobSpec) -> list[str]:
    """Return warnings about snapshots and output folders that two trials share."""
    snapshots, others = (snapshot_paths(j.script, j.args, j.workdir) for j in (one, other))
    warnings = [
        f"Warning: all trials save to the snapshot {path}, and a trial refuses that of another. "
        "Put {trial} into its path, or name none: Snapshot() uses a folder of the job."
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
    """Return the existing files and folders with the trial's snapshot: the folder of its job below
    the working directory, and paths in arguments with ``{trial}``. Only snapshots that record the
    trial's job and daemon as their owner, and that belong to this user, because every daemon has
    its own job ids, and several sweeps may name the same path.
    """
    name, daemon = trial.user_attrs.get(book.JOB), trial.user_attrs.get(book.DAEMON)
    if not name or not daemon:
        return []
    workdir = Path(ledger.sweep.job.workdir or os.getcwd())
    job_owner = RunIdentity(name, "", "", daemon)
    paths = [
        folder
        for folder in sorted((workdir / FOLDER).glob(f"{glob.escape(name)}-*"))
        if daemon_of_folder(folder.name) == daemon
        and _is_of(folder / FILE, job_owner, default=True)
    ]
    for path in _named(ledger, trial.number):
        place = workdir / os.path.expanduser(path)
        escaped = glob.escape(place.name)
        files = [place, *sorted(place.parent.glob(f"{escaped}.prev*"))]
        own = [file for file in files if file.is_file() and _is_of(file, job_owner, default=False)]
        paths += own
        if own and not any(file.is_file() for file in files if file not in own):
            paths += sorted(place.parent.glob(f"{escaped}.shards"))
            paths += sorted(place.parent.glob(f"{escaped}.open-epoch"))
    return [each for each in paths if _uid(each) == os.geteuid()]


def _uid(path: Path) -> int | None:
    """Return the user id of a file's or folder's owner; None if it is gone. Raises OSError."""
    try:
        return path.stat().st_uid
    except FileNotFoundError:
        return None


def _is_of(file: Path, mine: RunIdentity, default: bool) -> bool:
    """Return whether the snapshot belongs to that job; ``unsaid``: the answer if it records no
    owner."""
    recorded = owner_in(str(file))
    if recorded is None or not recorded.daemon:
        return default
    return (recorded.job, recorded.daemon) == (mine.job, mine.daemon)


def _named(ledger: Ledger, number: int) -> Iterator[str]:
    args = ledger.sweep.job.args
    for before, arg in zip(("", *args), args, strict=False):
        option, equals, value = arg.partition("=")
        path = value if equals and option in OPTIONS else arg if before in OPTIONS else ""
        if PLACE in path and not path.startswith("-"):
            yield path.replace(PLACE, str(number))


def best_snapshot(ledger: Ledger) -> Path | None:
    """Return the best trial's snapshot; None if there is none."""
    for trial in ledger.best()[:1]:
        for place in snapshots(ledger, trial):
            file = place / FILE if place.is_dir() else place
            if file.exists():
                return file
    return None


def snapshot_note(ledger: Ledger) -> str:
    """Return a sentence about the best trial's snapshot if it is of another step than the trial's
    value (``value = "best"``); empty if it is not, or if that step is not known.
    """
    for trial in ledger.best()[:1] if ledger.sweep.sweep.value == "best" else ():
        points = trial.intermediate_values.items()
        steps = [step for step, value in points if [value] == trial.values]
        if steps and max(steps) != trial.last_step:
            return (
                f"Its value is that of step {max(steps)}, and the snapshot is of its last steps, "
                f"up to {trial.last_step}."
            )
    return ""


def delete_losers(ledger: Ledger, now: float) -> list[int]:
    """Delete the snapshots of ended trials that are not among the best. Return the trials that had
    one. Running trials and failed ones, which their owner may want to examine, are left alone.

    Workers of a cancelled job may save again before they end, so a trial is checked repeatedly for
    a while.

    Raises:
        OSError: some cannot be read or deleted now; all others are deleted.
    """
    best = {t.number for t in ledger.best(ledger.sweep.sweep.keep)}
    forgotten = set(ledger.gone)
    deleted, settled = [], []
    first: OSError | None = None
    for trial in ledger.trials(TrialState.COMPLETE, TrialState.PRUNED):
        if trial.number in best or trial.number in forgotten:
            continue
        try:
            places = snapshots(ledger, trial)
            for place in places:
                _delete(place)
        except OSError as error:
            first = first or error
            continue
        ended = trial.datetime_complete
        if places:
            deleted.append(trial.number)
        elif ended is not None and now - ended.timestamp() > MAX_LATE_SAVE_S:
            settled.append(trial.number)
    if settled:
        ledger.forget_snapshots(settled)
    if first is not None:
        raise first
    return deleted


def _delete(place: Path) -> None:
    """Delete a snapshot. Raises OSError."""
    if place.is_dir():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)
        close_epoch(str(place))  # also removes the marker file next to it
