"""``malletrain pause``, ``resume``, ``drain``, ``exclude`` and ``reload``: changes by operators
while the daemon runs.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from malletrain.cli.common import client_of, refusal, say, state_dir_option

EVERY_NODE = "*"
NAMES_BYTES = 256 * 1024
"""Maximum total length of the names in one request, bytes: half of the maximum request."""
why_option = click.option(
    "--why",
    default="",
    metavar="TEXT",
    help="Reason, shown in the audit log and by 'malletrain nodes'.",
)


def _until(text: str) -> float:
    """Return the seconds since the epoch of ``--until``: a duration from now, or a local date and
    time."""
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
            f"--until {text}: give a local time such as 2026-11-30T18:00, or a duration such as "
            "'8 h'."
        ) from None


def _send(state_dir: Path | None, op: str, **params: Any) -> None:
    """Send the operation, in several requests if there are many nodes. All requests are sent even
    if some are refused; the command fails only if all are refused.
    """
    from malletrain.client import ClientError

    chunks, refused = _split_names(params.get("nodes", ())), []
    with client_of(state_dir) as client:
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


def _split_names(nodes: Sequence[str]) -> list[list[str]]:
    """Return the names, split for as many requests as needed; one request without names if there
    are none."""
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
    """Request no new leases until 'malletrain resume'. For operators.

    Existing leases stay, and jobs continue there; with --release all leases are given back. A
    restarted daemon stays paused.

    \b
    Examples:
      malletrain pause
      malletrain pause --release --why "the network is being looked at"
    """
    _send(state_dir, "pause", release=release, why=why)


@click.command()
@click.argument("nodes", nargs=-1, metavar="[NODE...]")
@click.option("--all", "everything", is_flag=True, help="End 'drain --all'.")
@state_dir_option
def resume(nodes: tuple[str, ...], everything: bool, state_dir: Path | None) -> None:
    """End a pause; with NODEs, let them be leased again. For operators.

    \b
    Examples:
      malletrain resume
      malletrain resume n7 n8
      malletrain resume --all
    """
    _send(state_dir, "resume", nodes=[*nodes, *([EVERY_NODE] if everything else [])])


@click.command()
@click.argument("nodes", nargs=-1, metavar="[NODE...]")
@click.option("--all", "everything", is_flag=True, help="All nodes of the machine.")
@click.option(
    "--until",
    metavar="TIME",
    help="When they may be leased again: 2026-11-30T18:00 (local), or after a duration: '8 h'.  "
    "[default: until 'malletrain resume NODE']",
)
@why_option
@state_dir_option
def drain(
    nodes: tuple[str, ...], everything: bool, until: str | None, why: str, state_dir: Path | None
) -> None:
    """Give NODEs (names, or lists such as "n[1-4,7]") back and do not lease them, such as before
    maintenance. For operators.

    Jobs move off as at a preemption. The main scheduler is not informed and may use the nodes.

    \b
    Examples:
      malletrain drain n7 n8 --why "new memory"
      malletrain drain --all --until 2026-11-30T18:00
    """
    if bool(nodes) == everything:
        raise click.UsageError("Name the nodes to drain, or give --all.")
    _send(
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
    """Request no new leases on NODEs until 'malletrain resume NODE'. For operators.

    An existing lease stays until it ends by itself; 'drain' gives it back.

    \b
    Example:
      malletrain exclude n7 --why "its fan is loud"
    """
    _send(state_dir, "exclude", nodes=list(nodes), why=why)


@click.command()
@state_dir_option
def reload(state_dir: Path | None) -> None:
    """Make the daemon read its configuration again. For operators.

    Prints the changes: those that take effect at once, those for jobs submitted from now on, and
    those that need a restart (jobs continue during a restart). An invalid file changes nothing.

    \b
    Examples:
      malletrain check --config site.toml && malletrain reload
      systemctl reload malletrain
    """
    with client_of(state_dir) as client:
        reply = client.call("reload", {}, changes=True)
    click.echo(reply["sentence"])
    for name, title in (
        ("applied", "Applied"),
        ("next_jobs", "For jobs that are submitted from now on"),
        ("restart", "Needs a restart of the daemon"),
    ):
        if reply[name]:
            click.echo("\n".join([f"{title}:", *(f"  {line}" for line in reply[name])]))
