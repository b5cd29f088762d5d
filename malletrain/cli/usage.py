"""``malletrain usage``: node-hours and energy of leases, by use."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import click

from malletrain.cli.common import client_of, json_option, print_json, print_text, state_dir_option


class _Date(click.DateTime):
    """Type of a date, a month or a date with time."""

    def __init__(self) -> None:
        super().__init__(("%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m"))

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime.datetime:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is no date; write 2026-11-01, 2026-11-01T08:00 or 2026-11.")


DATE = _Date()
WORDS = ("user", "account", "class", "month")


@click.command()
@click.option(
    "--by",
    type=click.Choice(WORDS),
    multiple=True,
    help="A row for each user, account, class of nodes or month; can be given several times.  "
    "[default: user]",
)
@click.option(
    "--since",
    type=DATE,
    metavar="DATE",
    help="Count from this time on, UTC: 2026-11-01, 2026-11-01T08:00 or 2026-11.  "
    "[default: the beginning]",
)
@click.option(
    "--until",
    type=DATE,
    metavar="DATE",
    help="Count up to this time, in the same forms.  [default: now]",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
@state_dir_option
@json_option
def usage(
    by: tuple[str, ...],
    since: datetime.datetime | None,
    until: datetime.datetime | None,
    as_csv: bool,
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Add up the leased node-hours by their use.

    LEASED are the node-hours held, TRAINED those in which samples were processed. STARTS,
    RESCALES and PREEMPTED were lost to starts of jobs, to rescales, and to rescales because of a
    preemption. NO JOB is the rest. Where leases are slots, these are slot-hours; CHARGED are the
    node-hours that they count by the prices of their kinds, GPU-H their GPU-hours. KWH needs
    watts in [accounting] of the daemon's configuration. You see your own usage; operators see
    that of all users.

    \b
    Examples:
      malletrain usage
      malletrain usage --by month --by user --since 2026-01 --csv > usage.csv
    """
    from malletrain.render import usage as render

    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other.")
    between = {
        name: at.replace(tzinfo=datetime.timezone.utc).timestamp()
        for name, at in (("since", since), ("until", until))
        if at is not None
    }
    if len(between) == 2 and between["since"] >= between["until"]:
        raise click.UsageError("--since is not before --until.")
    apart = [word for word in WORDS if word in (by or WORDS[:1])]
    with client_of(state_dir) as client:
        rows = render.added_up(client.usage(**between), apart)
    if as_json:
        print_json(rows)
    elif as_csv:
        click.echo(render.as_csv(rows), nl=False)
    else:
        print_text(render.table(rows, apart))
