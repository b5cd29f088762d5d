"""``malletrain key``: prints the line for the list of users of a site's daemon."""

from __future__ import annotations

import click

from malletrain.cli.common import Refused


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
