"""``malletrain export`` and ``malletrain cp``: the results of a job, in a file and in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import click

from malletrain.cli.common import (
    DaemonUnreachable,
    Refused,
    client_of,
    folders,
    job_names,
    json_option,
    print_json,
    state_dir_option,
)


@click.command()
@click.argument("job", metavar="JOB", shell_complete=job_names())
@click.option(
    "--out",
    "-o",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Path of the weights.  [default: JOB.safetensors]",
)
@click.option(
    "--object",
    "name",
    default="",
    metavar="NAME",
    help="Name of the model in the script's Snapshot(NAME=…).  [default: model, or the only one]",
)
@click.option(
    "--tensorboard",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Instead write the job's metrics and scale over time as a TensorBoard run below DIR.",
)
@click.option(
    "--metrics",
    "table",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Instead write the job's metrics over time as CSV.",
)
@state_dir_option
def export(
    job: str,
    out: str | None,
    name: str,
    folder: Path | None,
    table: Path | None,
    state_dir: Path | None,
) -> None:
    """Write the weights of JOB (id, name, or path of a snapshot) as safetensors, or its metrics.

    Reads the newest good snapshot, sharded or not, from any number of ranks, while the job runs or
    later. Needs memory for the weights, but neither a GPU nor a running daemon.

    \b
    Examples:
      malletrain export train
      malletrain export j3 --out weights.safetensors
      malletrain export runs/big.pt --object teacher
      malletrain export train --tensorboard runs && tensorboard --logdir runs
    """
    if folder is not None or table is not None:
        _export_metrics(job, folder, table, state_dir)
        return
    from malletrain.training.export import read_weights, write_safetensors
    from malletrain.training.snapshot_file import SnapshotError

    out = out or f"{os.path.basename(job).partition('.')[0]}.safetensors"
    try:
        path = _snapshot_of(job, state_dir)
        weights = read_weights(path, name)
        write_safetensors(weights, out)
    except SnapshotError as error:
        raise Refused(str(error)) from None
    except ImportError as error:
        raise Refused(f"Exporting needs torch on this machine: {error}.") from None
    except OSError as error:
        raise Refused(f"The weights cannot be written to {out}: {error.strerror}.") from None
    click.echo(
        f"Wrote {len(weights.tensors)} tensors of {weights.name!r}, {weights.bytes / 1e6:.1f} MB, "
        f"saved {weights.saved} in {path}, to {out}."
    )


def _snapshot_of(job: str, state_dir: Path | None) -> str:
    from malletrain.api.copies import snapshot_of
    from malletrain.protocol.messages import daemon_of
    from malletrain.training.owner import path_of
    from malletrain.training.snapshot_file import SnapshotError

    if os.sep in job or os.path.isfile(job):
        return path_of(job)
    try:
        with client_of(state_dir) as client:
            view = client.job(job)
            daemon = daemon_of(client.status().boot)
    except (DaemonUnreachable, Refused) as error:
        try:
            return path_of(job)  # a job of another daemon, or of one that does not run
        except SnapshotError:
            raise error from None
    return snapshot_of(view, daemon)


def _export_metrics(
    job: str, folder: Path | None, table: Path | None, state_dir: Path | None
) -> None:
    from malletrain.api.series import JobMetrics, write_csv, write_events

    with client_of(state_dir) as client:
        detail = client.job(job)
        metrics = JobMetrics(client.metrics(detail.job.id))
    if not metrics:
        raise Refused(f"{job} has reported no metric; its script calls malletrain.metric for that.")
    try:
        files = []
        if folder is not None:
            files.append(write_events(folder, detail, metrics.values()))
        if table is not None:
            files.append(write_csv(table, metrics))
    except OSError as error:
        raise Refused(
            f"The metrics cannot be written: {error.strerror}: {error.filename}."
        ) from None
    values = sum(map(len, metrics.values()))
    for file in files:
        click.echo(f"Wrote {values} values of {len(metrics)} metrics to {file}.")


@click.command()
@click.argument("job", metavar="JOB", shell_complete=job_names())
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), shell_complete=folders)
@click.option("--snapshot", is_flag=True, help="Only its newest snapshot.")
@click.option("--logs", is_flag=True, help="Only its logs.")
@state_dir_option
@json_option
def cp(
    job: str, folder: Path, snapshot: bool, logs: bool, state_dir: Path | None, as_json: bool
) -> None:
    """Copy the newest snapshot and the logs of JOB (id or name) into FOLDER.

    A snapshot in shards is copied with them. It is read from the folder to which the job wrote it,
    so this machine must see that folder; logs come from the daemon. The job may still run.

    \b
    Examples:
      malletrain cp train results
      malletrain cp j3 results --logs
    """
    from malletrain.api.aio import AsyncJob
    from malletrain.api.session import BlockingSession, finish
    from malletrain.training.snapshot_file import SnapshotError

    both = not (snapshot or logs)
    try:
        with client_of(state_dir) as client:
            source = AsyncJob(BlockingSession(lambda: client), client.job(job).job)
            files = finish(source.copy(folder, snapshot=snapshot or both, logs=logs or both))
    except SnapshotError as error:
        raise Refused(f"{error} Its logs: malletrain cp {job} {folder} --logs") from None
    except OSError as error:
        raise Refused(
            f"{error.filename or folder} cannot be copied: {error.strerror or error}."
        ) from None
    if as_json:
        print_json([str(file) for file in files])
        return
    for file in files:
        click.echo(f"Wrote {file}.")
