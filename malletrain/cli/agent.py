"""``malletrain agent``: started by a lease's batch script. Hidden, because users do not call it."""

from __future__ import annotations

import click


@click.command(
    hidden=True, add_help_option=False, context_settings={"ignore_unknown_options": True}
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def agent(args: tuple[str, ...]) -> int:
    """Run the agent of one leased node (the same as python -m malletrain.agent)."""
    import sys

    from malletrain.agent.__main__ import main

    sys.argv = ["malletrain agent", *args]
    return main()
