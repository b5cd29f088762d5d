"""``malletrain members``: shows the members of a service and their addresses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from malletrain.cli.common import asking, json_option, print_json, state_dir_option
from malletrain.cli.completion import job_names

if TYPE_CHECKING:
    from malletrain.protocol.views import MembersView

FOLLOW_WAIT_S = 30.0
"""Maximum time for which one request of ``--follow`` waits, seconds."""


@click.command()
@click.argument("job", shell_complete=job_names(unfinished=True))
@click.option(
    "--key",
    is_flag=True,
    help="Instead print the secret that the service's processes share; for the job's owner only.",
)
@click.option(
    "--follow",
    "-f",
    is_flag=True,
    help="Print the members again at each change, until the service ends.",
)
@state_dir_option
@json_option
def members(job: str, key: bool, follow: bool, state_dir: Path | None, as_json: bool) -> None:
    """Show the members of the service JOB (id or name): node, address, and whether it is loading or
    about to leave.

    \b
    Examples:
      malletrain members cache
      malletrain members cache --json
      malletrain members cache --follow
      MALLETRAIN_JOB_KEY=$(malletrain members cache --key) python client.py
    """
    if key and follow:
        raise click.UsageError("--key does not change; leave --follow out.")
    with asking(state_dir) as client:
        view = client.members(job)
        if key and not as_json:
            click.echo(view.key)
            return
        _print(view, as_json)
        while follow and view.version:
            before = view.version
            view = client.members(view.job, since=before, wait_s=FOLLOW_WAIT_S)
            if view.version != before:
                if not as_json:
                    click.echo()
                _print(view, as_json)


def _print(view: MembersView, as_json: bool) -> None:
    if as_json:
        print_json(view)
    elif not view.members:
        click.echo(f"Job {view.job} has no members now.")
    for m in () if as_json else view.members:
        loading = "  loading" if m.loading else ""
        leaving = "" if m.gone_in_s is None else f"  leaves within {m.gone_in_s:.0f} s"
        click.echo(f"{m.node}  {m.address or m.host}{loading}{leaving}")
