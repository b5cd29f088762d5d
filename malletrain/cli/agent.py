"""``malletrain agent``: what a lease's batch script starts. Hidden, because people never type it."""

from __future__ import annotations

import click


@click.command(hidden=True, add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def agent(args: tuple[str, ...]) -> int:
    """Run the agent of one leased node (the same as python -m malletrain.agent)."""
    from malletrain.agent import main

    return int(main(list(args)) or 0)
