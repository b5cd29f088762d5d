"""``malletrain shipped``: prints the paths of files that come with MalleTrain."""

from __future__ import annotations

import click

from malletrain.cli.common import Refused


@click.command()
@click.argument("name", required=False)
def shipped(name: str | None) -> None:
    """Print the path of a file that comes with MalleTrain, or the names of all of them.

    These are configurations of sites, the systemd unit, batch scripts of the leases and examples.

    \b
    Examples:
      malletrain shipped
      cp "$(malletrain shipped site-configs/slurm.toml)" site.toml
    """
    from malletrain.shipped import names
    from malletrain.shipped import shipped as path_of

    if name is None:
        for file in names():
            click.echo(file)
        return
    try:
        click.echo(path_of(name))
    except FileNotFoundError as error:
        raise Refused(str(error)) from None
