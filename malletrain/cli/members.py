"""``malletrain members``: shows the members of a service and their addresses."""

from __future__ import annotations

from pathlib import Path

import click

from malletrain.cli.common import asking, json_option, print_json, state_dir_option
from malletrain.cli.completion import job_names


@click.command()
@click.argument("job", shell_complete=job_names(unfinished=True))
@click.option(
    "--key",
    is_flag=True,
    help="Instead print the secret that the service's processes share; for the job's owner only.",
)
@state_dir_option
@json_option
def members(job: str, key: bool, state_dir: Path | None, as_json: bool) -> None:
    """Show the members of the service JOB (id or name): node, address, and whether it is about to
    leave.

    \b
    Examples:
      malletrain members cache
      malletrain members cache --json
      MALLETRAIN_JOB_KEY=$(malletrain members cache --key) python client.py
    """
    with asking(state_dir) as client:
        view = client.members(job)
    if as_json:
        print_json(view)
    elif key:
        click.echo(view.key)
    elif not view.members:
        click.echo(f"Job {view.job} has no members now.")
    else:
        for m in view.members:
            leaving = "" if m.gone_in_s is None else f"  leaves within {m.gone_in_s:.0f} s"
            click.echo(f"{m.node}  {m.address or m.host}{leaving}")
