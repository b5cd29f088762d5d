"""``malletrain scale``: changes the minimum and maximum number of nodes of a job."""

from __future__ import annotations

from pathlib import Path

import click

from malletrain.cli.common import client_of, state_dir_option
from malletrain.cli.completion import job_names


@click.command()
@click.argument("job", metavar="JOB", shell_complete=job_names(unfinished=True))
@click.argument("nodes", metavar="N|MIN:MAX")
@state_dir_option
def scale(job: str, nodes: str, state_dir: Path | None) -> None:
    """Change the minimum and maximum number of nodes of JOB, or of its slots or GPUs if it was
    submitted with --slots or --gpus.

    A running job outside the new limits is rescaled; if its new minimum is not available, it is
    suspended and keeps its place. Refused while a job is being profiled, and for a maximum above
    the one with which the job started, because its processes are sized for that one.

    \b
    Examples:
      malletrain scale train 2:8
      malletrain scale j7 4
    """
    from malletrain.submission.error import SpecError
    from malletrain.submission.spec import parse_nodes

    try:
        low, high = parse_nodes(nodes)
    except SpecError as error:
        raise click.UsageError(str(error)) from None
    with client_of(state_dir) as client:
        limits = {"job": job, "min_nodes": low, "max_nodes": high}
        reply = client.call("scale", limits, changes=True)
    click.echo(reply["sentence"])
