"""``malletrain nodes``: shows gaps, leases and the jobs on them."""

from __future__ import annotations

import time
from pathlib import Path

import click

from malletrain.cli.common import client_of, json_option, print_json, print_text, state_dir_option


@click.command()
@click.option(
    "--explain",
    is_flag=True,
    help="Show for every node of the machine why it is or is not a gap, rule by rule.",
)
@state_dir_option
@json_option
def nodes(explain: bool, state_dir: Path | None, as_json: bool) -> None:
    """Show the nodes that MalleTrain holds or that are idle, and the job on each.

    The states: training (a job is on it); running tasks (its job is a farm); held, no job; asked
    for (a lease is requested from the main scheduler); leaving (it goes back to the main
    scheduler); idle (neither the main scheduler nor MalleTrain uses it); sick (it failed a health
    check) and slow (it held up the other nodes of a job), both left alone for a while. In --json
    they are job (also if the job is a farm), free, leasing, leaving, idle, sick and slow.

    \b
    Examples:
      malletrain nodes
      malletrain nodes --explain
    """
    from malletrain.render import tables

    with client_of(state_dir) as client:
        rows = client.nodes(explain=explain)
        names = {} if as_json else {j.id: j.name for j in client.jobs()}
    if as_json:
        print_json(rows)
    else:
        print_text(tables.nodes(rows, time.time(), explain=explain, names=names))
