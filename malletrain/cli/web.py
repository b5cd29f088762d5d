"""``malletrain web``: serves the page for the browser."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from malletrain.cli.common import Refused, say, state_dir_option
from malletrain.protocol import env


@click.command()
@click.option(
    "--listen",
    default="127.0.0.1",
    show_default=True,
    metavar="HOST[:PORT]|unix:PATH",
    help="Address to listen on. Without a port, the first free one from 8870 on.",
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="Additional host name of the page besides 127.0.0.1 and localhost, such as that of a "
    "proxy; can be given several times.",
)
@click.option(
    "--trust-header",
    default="",
    metavar="HEADER",
    help="Trust a reverse proxy's header with the user's name, such as X-Remote-User. Only on the "
    "loopback, with a token, or on a Unix socket.  [default: off]",
)
@click.option(
    "--browser/--no-browser",
    default=None,
    help="Open the page in a browser.  [default: if there is a display]",
)
@state_dir_option
def web(
    listen: str,
    allow_host: tuple[str, ...],
    trust_header: str,
    browser: bool | None,
    state_dir: Path | None,
) -> None:
    """Serve a web page about the machine and its jobs.

    It runs with your rights, like the other commands. The printed address contains a token; anybody
    who has it can act as you, so keep it secret. Ctrl-C ends the page; your jobs continue.

    On a machine you reach with ssh, forward the port and open the address on your own computer:

    \b
      ssh -L 8870:127.0.0.1:8870 login.example.org malletrain web --listen 127.0.0.1:8870

    \b
    Examples:
      malletrain web
      malletrain web --listen 127.0.0.1:9000 --no-browser
      malletrain web --listen unix:/run/malletrain/web --trust-header X-Remote-User
    """
    try:
        from malletrain.web import serve
        from malletrain.web.poller import connector
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "malletrain":
            raise
        raise Refused(
            f"The page needs the package {error.name}, which is not installed; run: "
            "pip install --find-links WHEELS 'malletrain[web]'"
        ) from None
    from malletrain.identity.keys import user_name
    from malletrain.identity.state_directory import StateDirError, default_state_dir

    token = os.environ.pop(env.WEB_TOKEN, "")
    try:
        address = serve.parse_address(listen)
        policy = serve.make_access_policy(address, user_name(), token, allow_host, trust_header)
        has_display = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
        opens = (has_display or sys.platform == "darwin") if browser is None else browser
        serve.serve(
            connector(state_dir),
            address,
            policy,
            lambda url: say(f"The page is at {url}\nCtrl-C ends it."),
            state_dir or default_state_dir(),
            browser=opens and not address.path,
        )
    except (serve.WebError, StateDirError) as error:
        raise Refused(str(error)) from None
