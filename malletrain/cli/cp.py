"""``malletrain cp``: copies the results of a job into a folder."""

from __future__ import annotations

from pathlib import Path

import click

from malletrain.cli.common import Refused, client_of, json_option, print_json, state_dir_option
from malletrain.cli.completion import folders, job_names


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
