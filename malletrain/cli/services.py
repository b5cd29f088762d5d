"""Commands for services: ``malletrain members`` shows the members of a service, ``malletrain
worth`` shows and sets what nodes are worth to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from malletrain.cli.common import client_of, job_names, json_option, print_json, state_dir_option

if TYPE_CHECKING:
    from malletrain.protocol.views import MembersView

FOLLOW_WAIT_S = 30.0
"""Maximum time for which one request of ``--follow`` waits, seconds."""


@click.command()
@click.argument("job", shell_complete=job_names(unfinished=True))
@click.option(
    "--key",
    is_flag=True,
    help="Instead print the secret that the service's processes share; for the job's owner only.",
)
@click.option(
    "--follow",
    "-f",
    is_flag=True,
    help="Print the members again at each change, until the service ends.",
)
@state_dir_option
@json_option
def members(job: str, key: bool, follow: bool, state_dir: Path | None, as_json: bool) -> None:
    """Show the members of the service JOB (id or name): node, address, and whether it is loading or
    about to leave.

    \b
    Examples:
      malletrain members cache
      malletrain members cache --json
      malletrain members cache --follow
      MALLETRAIN_JOB_KEY=$(malletrain members cache --key) python client.py
    """
    if key and follow:
        raise click.UsageError("--key prints a secret that does not change; leave out --follow.")
    with client_of(state_dir) as client:
        view = client.members(job)
        if key and not as_json:
            click.echo(view.key)
            return
        _print_members(view, as_json)
        while follow and view.version:
            before = view.version
            view = client.members(view.job, since=before, wait_s=FOLLOW_WAIT_S)
            if view.version != before:
                if not as_json:
                    click.echo()
                _print_members(view, as_json)


def _print_members(view: MembersView, as_json: bool) -> None:
    if as_json:
        print_json(view)
    elif not view.members:
        click.echo(f"Job {view.job} has no members now.")
    for m in () if as_json else view.members:
        loading = "  loading" if m.loading else ""
        leaving = "" if m.gone_in_s is None else f"  leaves within {m.gone_in_s:.0f} s"
        click.echo(f"{m.node}  {m.address or m.host}{loading}{leaving}")


@click.command()
@click.argument("job", metavar="JOB", shell_complete=job_names(unfinished=True))
@click.argument("values", metavar="[NODES=VALUE]...", nargs=-1)
@click.option(
    "--next",
    "next_each",
    metavar="VALUE",
    help="Value that each of the next nodes adds. The nodes that the service has keep theirs.",
)
@click.option(
    "--count",
    metavar="N",
    type=int,
    help="With --next: number of the next nodes. Default: 1.",
)
@click.option(
    "--nothing",
    is_flag=True,
    help="Nodes are worth nothing now: the service gives all of them back and waits for none.",
)
@click.option(
    "--expires",
    metavar="TIME",
    help='Time after which the values lapse unless they are set again, such as "60s". Then the '
    "last values without such a limit apply. Default: never.",
)
@state_dir_option
@json_option
def worth(
    job: str,
    values: tuple[str, ...],
    next_each: str | None,
    count: int | None,
    nothing: bool,
    expires: str | None,
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Set what nodes are worth to the service JOB from now on, or show it if no value is given.

    A value is a throughput in samples/s, as in the file of 'submit --value'; between the sizes that
    you name it is interpolated. Only the owner of the service can set it.

    \b
    Examples:
      malletrain worth serve 4=40 8=100 16=180
      malletrain worth serve --next 25 --count 2 --expires 60s
      malletrain worth serve --nothing
      malletrain worth serve
    """
    ways = (bool(values), next_each is not None, nothing)
    if sum(ways) > 1:
        raise click.UsageError("Give NODES=VALUE, --next or --nothing, only one of them.")
    if not any(ways):
        if count is not None or expires is not None:
            raise click.UsageError("--count and --expires belong to a value; give one.")
        with client_of(state_dir) as client:
            view = client.members(job)
        if as_json:
            print_json(view)
        else:
            click.echo(_values_text(view))
        return
    if count is not None and next_each is None:
        raise click.UsageError("--count belongs to --next.")
    by_nodes, each = _values_by_nodes(values, nothing), _next_value(next_each)
    expires_s, next_count = _expiry_s(expires), 1 if count is None else count
    from malletrain.client import operations

    with client_of(state_dir) as client:
        sentence = client.do(
            operations.worth(
                job, by_nodes, next_each=each, next_count=next_count, expires_s=expires_s
            )
        )
    if as_json:
        print_json({"sentence": sentence})
    else:
        click.echo(sentence)


def _values_by_nodes(values: tuple[str, ...], nothing: bool) -> dict[int, float] | None:
    """Return the values by number of nodes; None if there are none."""
    from malletrain.submission.curve_file import parse_values
    from malletrain.submission.error import SpecError

    if nothing:
        return {1: 0.0}
    if not values:
        return None
    try:
        return parse_values(values)
    except SpecError as error:
        raise click.UsageError(str(error)) from None


def _next_value(text: str | None) -> float | None:
    """Return the value of each next node."""
    from malletrain.submission.curve_file import parse_value
    from malletrain.submission.error import SpecError

    if text is None:
        return None
    try:
        return parse_value("--next", text)
    except SpecError as error:
        raise click.UsageError(str(error)) from None


def _expiry_s(text: str | None) -> float | None:
    """Return the seconds of ``--expires``; None if it is not given."""
    from malletrain.config.units import UnitError, parse_duration

    if text is None:
        return None
    try:
        return parse_duration(text)
    except UnitError as error:
        raise click.UsageError(f"--expires: {error}") from None


def _values_text(view: MembersView) -> str:
    """Return the present values, as lines."""
    from malletrain.config.units import show_duration

    if not any(view.values.values()):
        lines = ["Nodes are worth nothing to it."]
    else:
        lines = ["nodes  value"]
        lines += [f"{nodes:>5}  {value:g}" for nodes, value in sorted(view.values.items())]
    if view.values_expire_in_s is not None:
        lines.append(f"lapses in {show_duration(view.values_expire_in_s)}")
    return "\n".join(lines)
