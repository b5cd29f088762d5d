"""``malletrain scale``: other limits of a job's scale."""

from __future__ import annotations

from pathlib import Path

import click

from malletrain.cli.common import asking, state_dir_option
from malletrain.cli.completion import job_names


@click.command()
@click.argument("job", metavar="JOB", shell_complete=job_names(unfinished=True))
@click.argument("nodes", metavar="N|MIN:MAX")
@state_dir_option
def scale(job: str, nodes: str, state_dir: Path | None) -> None:
    """Give JOB other limits of its scale: the fewest and the most nodes it may use.

    A running job that has more or fewer nodes than that is rescaled; one whose new minimum cannot
    be had is suspended and keeps its place. While a job is being profiled this is refused, and so
    are more nodes than it has begun with at most: what its processes are sized for stays.

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
    with asking(state_dir) as client:
        limits = {"job": job, "min_nodes": low, "max_nodes": high}
        done = client.call("scale", limits, changes=True)
    click.echo(done["sentence"])
