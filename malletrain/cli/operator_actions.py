"""``malletrain pause``, ``resume``, ``drain``, ``exclude`` and ``reload``: what operators change
while the daemon runs.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from malletrain.cli.common import asking, refusal, say, state_dir_option

EVERY_NODE = "*"
NAMES_BYTES = 256 * 1024
"""Of names in one request: half of what it may have."""
why_option = click.option(
    "--why", default="", metavar="TEXT", help="Stands in the audit log, and where nodes are shown."
)


def _until(text: str) -> float:
    """A time in seconds since the epoch: a duration from now on, or a local date and time."""
    from malletrain.config.units import UnitError, parse_duration

    for form in ("%Y-%m-%dT%H:%M", "%Y-%m-%d"):
        try:
            return datetime.datetime.strptime(text, form).astimezone().timestamp()
        except ValueError:
            continue
    try:
        return time.time() + parse_duration(text)
    except UnitError:
        raise click.UsageError(
            f"--until {text}: give a local time such as 2026-11-30T18:00, or how long, such as "
            "'8 h'."
        ) from None


def _do(state_dir: Path | None, op: str, **params: Any) -> None:
    """Of several requests each is sent, whatever becomes of the others; only where all are refused
    the command is.
    """
    from malletrain.client import ClientError

    chunks, refused = _in_parts(params.get("nodes", ())), []
    with asking(state_dir) as client:
        for nodes in chunks:
            arguments = {**params, "nodes": nodes} if nodes else params
            try:
                click.echo(client.call(op, arguments, changes=True)["sentence"])
            except ClientError as error:
                if len(chunks) == 1 or error.code not in ("refused", "usage"):
                    raise
                refused.append(error)
                say(f"Refused for {len(nodes)} nodes, {nodes[0]} to {nodes[-1]}: {error}")
    if len(refused) == len(chunks):
        raise click.exceptions.Exit(refusal(refused[0]).exit_code)


def _in_parts(nodes: Sequence[str]) -> list[list[str]]:
    """The names in as many requests as they need; one without names where there are none."""
    parts: list[list[str]] = [[]]
    size = 0
    for name in nodes:
        size += len(name.encode("utf-8", "surrogateescape")) + 5
        if parts[-1] and size > NAMES_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(name)
    return parts


@click.command()
@click.option(
    "--release", is_flag=True, help="Give all leases back, too, once their jobs have moved off."
)
@why_option
@state_dir_option
def pause(release: bool, why: str, state_dir: Path | None) -> None:
    """Lease nothing new until 'malletrain resume'. For operators.

    What is held stays, and jobs go on there; with --release everything is given back. A daemon that
    is started again stays paused.

    \b
    Examples:
      malletrain pause
      malletrain pause --release --why "the network is being looked at"
    """
    _do(state_dir, "pause", release=release, why=why)


@click.command()
@click.argument("nodes", nargs=-1, metavar="[NODE...]")
@click.option("--all", "everything", is_flag=True, help="End what 'drain --all' began.")
@state_dir_option
def resume(nodes: tuple[str, ...], everything: bool, state_dir: Path | None) -> None:
    """End a pause; with NODEs, let them be leased again. For operators.

    \b
    Examples:
      malletrain resume
      malletrain resume n7 n8
      malletrain resume --all
    """
    _do(state_dir, "resume", nodes=[*nodes, *([EVERY_NODE] if everything else [])])


@click.command()
@click.argument("nodes", nargs=-1, metavar="[NODE...]")
@click.option("--all", "everything", is_flag=True, help="All nodes of the machine.")
@click.option(
    "--until",
    metavar="TIME",
    help="When they may be leased again: 2026-11-30T18:00 (local), or how long: '8 h'.  "
    "[default: until 'malletrain resume NODE']",
)
@why_option
@state_dir_option
def drain(
    nodes: tuple[str, ...], everything: bool, until: str | None, why: str, state_dir: Path | None
) -> None:
    """Give NODEs (names, or lists such as "n[1-4,7]") back and leave them alone, as before
    maintenance. For operators.

    Jobs move off as they do when the main scheduler wants a node. The main scheduler is told
    nothing: it may use the nodes.

    \b
    Examples:
      malletrain drain n7 n8 --why "new memory"
      malletrain drain --all --until 2026-11-30T18:00
    """
    if bool(nodes) == everything:
        raise click.UsageError("Name the nodes to drain, or give --all.")
    _do(
        state_dir,
        "drain",
        nodes=[EVERY_NODE] if everything else list(nodes),
        until=None if until is None else _until(until),
        why=why,
    )


@click.command()
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@why_option
@state_dir_option
def exclude(nodes: tuple[str, ...], why: str, state_dir: Path | None) -> None:
    """Take no lease on NODEs any more, until 'malletrain resume NODE'. For operators.

    A lease that is held there stays until it ends by itself; 'drain' gives it back.

    \b
    Example:
      malletrain exclude n7 --why "its fan is loud"
    """
    _do(state_dir, "exclude", nodes=list(nodes), why=why)


@click.command()
@state_dir_option
def reload(state_dir: Path | None) -> None:
    """Have the daemon read its configuration again. For operators.

    Says what has changed: what holds at once, what for the jobs submitted from now on, and what
    waits for a restart (jobs go on over one). A file that is not valid changes nothing.

    \b
    Examples:
      malletrain check --config site.toml && malletrain reload
      systemctl reload malletrain
    """
    with asking(state_dir) as client:
        done = client.call("reload", {}, changes=True)
    click.echo(done["sentence"])
    for name, title in (
        ("applied", "Applied"),
        ("next_jobs", "For jobs that are submitted from now on"),
        ("restart", "Needs a restart of the daemon"),
    ):
        if done[name]:
            click.echo("\n".join([f"{title}:", *(f"  {line}" for line in done[name])]))
