"""``malletrain shipped`` and ``malletrain key``: what the setup of a site needs, the files that
come with MalleTrain and the keys of users.
"""

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


@click.command()
def key() -> None:
    """Print your name and public key, as a line for the list of users of a site's daemon.

    The key pair is created at the first call and stored in ~/.config/malletrain; the secret half
    never leaves it. Not needed for a daemon of your own, nor if the site's daemon accepts MUNGE.

    \b
    Example, for the operator:
      malletrain key >> /etc/malletrain/users
    """
    from malletrain.identity.keys import own_key, user_name
    from malletrain.identity.state_directory import StateDirError

    try:
        click.echo(f"{user_name()} {own_key().public}")
    except StateDirError as error:
        raise Refused(str(error)) from None
