"""``malletrain top``: the live screen."""

from __future__ import annotations

import time
from pathlib import Path

import click

from malletrain.cli.common import Refused, asking, state_dir_option


@click.command()
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1, max=60),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
@click.option(
    "--all", "all_nodes", is_flag=True, help="Show also the nodes that the main scheduler uses."
)
@click.option("--once", is_flag=True, help="Print the screen once and end; also works in a pipe.")
@state_dir_option
def top(interval: float, all_nodes: bool, once: bool, state_dir: Path | None) -> None:
    """Watch nodes, throughput and events live. Ctrl-C ends it.

    It goes on when the daemon is restarted, and says so while the daemon is away.

    \b
    Example:
      malletrain top
    """
    from rich.live import Live

    from malletrain.client import ClientError
    from malletrain.render.console import console
    from malletrain.render.follow import Follower
    from malletrain.render.live import Screen

    terminal = console()
    if not terminal.is_terminal and not once:
        raise Refused(
            "The live screen needs a terminal; use 'malletrain top --once' or 'malletrain "
            "status' in a pipe."
        )
    screen = Screen()
    with asking(state_dir) as client:
        follower = Follower(screen, client, all_nodes=all_nodes)
        follower.look()
        if once:
            terminal.print(screen.render(terminal.width, terminal.height), height=terminal.height)
            return
    with Live(console=terminal, screen=True, auto_refresh=False) as live:
        while True:
            try:
                with asking(state_dir) as client:
                    follower.client = client
                    while True:
                        live.update(screen.render(terminal.width, terminal.height), refresh=True)
                        time.sleep(interval)
                        follower.look()
            except (ClientError, click.ClickException) as error:
                screen.unreachable(str(error))
                live.update(screen.render(terminal.width, terminal.height), refresh=True)
                time.sleep(interval)
