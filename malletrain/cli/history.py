"""What happened and what it took: the audit log and the use of leases.

``malletrain events`` shows the audit log, also as a trace of which node was held when, for a replay
or a simulation. A trace has joins and losses of nodes only. ``docs/traces.md`` describes its form.

``malletrain usage`` shows node-hours and energy of leases, by use.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from malletrain.cli.common import (
    Refused,
    client_of,
    job_names,
    json_option,
    print_json,
    print_json_line,
    print_text,
    state_dir_option,
)

if TYPE_CHECKING:
    from malletrain.client import Connection
    from malletrain.protocol.views import EventView

HEADER = "time_s,node,event"


def lease_trace(events: Iterable[EventView], until: float) -> Iterator[str]:
    """Yield the lines of the trace, without line ends; time 0 is the first join.

    A node that joins twice in a row (it was adopted after a restart) is written once. If the clock
    was set back, no event becomes earlier than the previous one. Nodes that are still held stay so
    until the end of the trace.

    Args:
        events: all events, oldest first.
        until: time at which the events were read, seconds since the epoch.
    """
    from malletrain.protocol.event_kinds import EventKind

    nodes: set[str] = set()
    last: dict[str, float] = {}
    begin: float | None = None
    now = 0.0
    yield HEADER
    for e in events:
        joined = e.kind == EventKind.NODE_JOINED
        if (not joined and e.kind != EventKind.NODE_LOST) or joined == (e.node in nodes):
            continue
        begin = e.time if begin is None else begin
        # To the millisecond, and no node twice at one instant, because a trace orders changes by
        # their times.
        now = last[e.node] = round(max(now, e.time - begin, last.get(e.node, -1.0) + 0.001), 3)
        (nodes.add if joined else nodes.discard)(e.node)
        yield f"{now:.3f},{e.node},{'idle' if joined else 'busy'}"
    for node in sorted(nodes):
        now = round(max(now, until - (begin or 0.0), last[node] + 0.001), 3)
        yield f"{now:.3f},{node},busy"


PAGE = 1000
RETRY_INTERVAL_S = 1.0


@click.command()
@click.option(
    "--follow",
    "-f",
    is_flag=True,
    help="Continue with new events until Ctrl-C, also after a restart of the daemon.",
)
@click.option(
    "--job",
    metavar="JOB",
    shell_complete=job_names(),
    help="Only events of this job (id or name).",
)
@click.option(
    "--last",
    metavar="N",
    type=click.IntRange(min=1, max=1000),
    help="Only the newest N events (and what follows).",
)
@click.option(
    "--since",
    metavar="SEQ",
    type=click.IntRange(min=0),
    default=0,
    help="Only events after this number (seq in --json).",
)
@click.option(
    "--as-trace",
    is_flag=True,
    help="Instead print which node was held when, as a trace for `malletrain simulate --trace`.",
)
@click.option(
    "--output",
    "-o",
    type=click.File("w", encoding="utf-8", lazy=True),
    metavar="FILE",
    help="With --as-trace: where the trace is written.  [default: standard output]",
)
@state_dir_option
@json_option
def events(
    follow: bool,
    job: str | None,
    last: int | None,
    since: int,
    as_trace: bool,
    output: IO[str] | None,
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Print the events of nodes, leases and jobs, oldest first.

    With --json, one event per line: seq, time, kind, job, node, lease, sentence, data.

    \b
    Examples:
      malletrain events --job train
      malletrain events --last 20 --follow
      malletrain events --json > audit.jsonl
      malletrain events --as-trace -o held.csv
    """
    from malletrain.client import ClientError, Unreachable
    from malletrain.client.errors import RETRIED
    from malletrain.render import tables

    if output is not None and not as_trace:
        raise click.UsageError("--output is for --as-trace; for events use > FILE.")
    if as_trace and (follow or job or last or since or as_json):
        raise click.UsageError("A trace is made of all events; give --as-trace without a filter.")
    with client_of(state_dir) as client, contextlib.ExitStack() as later_clients:
        if as_trace:
            _write_trace(client, output)
            return
        names = {} if as_json else {j.id: j.name for j in client.jobs()}
        since = -last if last else since
        while True:
            try:
                wait_s = 5.0 if follow else 0.0
                page = client.events(since=since, limit=PAGE, job=job, wait_s=wait_s)
                if not as_json and any(e.job and e.job not in names for e in page):
                    names = {j.id: j.name for j in client.jobs()}
            except ClientError as error:
                if not follow or error.code not in RETRIED:
                    raise
                if not isinstance(error, Unreachable):  # too many requests of this user
                    time.sleep(RETRY_INTERVAL_S)
                    continue
                click.echo(f"{error} Its events follow when it runs again.", err=True)
                client.close()
                client = later_clients.enter_context(_reconnect(state_dir))
                continue
            for event in page:
                if as_json:
                    print_json_line(event)
                else:
                    print_text(tables.EventLine(event, names, dated=True))
            complete = len(page) < PAGE or since < 0
            since = page[-1].seq if page else max(0, since)
            if not follow and complete:
                return


def _reconnect(state_dir: Path | None) -> Connection:
    """Wait until the daemon runs again and return a client of it."""
    from malletrain.client import ClientError, Connection, Unreachable
    from malletrain.client.errors import RETRIED

    while True:
        time.sleep(RETRY_INTERVAL_S)
        try:
            client = Connection.of(state_dir)
        except Unreachable:
            continue
        try:
            client.status()
        except ClientError as error:
            client.close()
            if error.code not in RETRIED:
                raise
            continue
        return client


def _write_trace(client: Connection, output: IO[str] | None) -> None:

    events = list(_all_events(client))
    lines = list(lease_trace(events, client.status().now))
    if len(lines) == 1:
        raise Refused("No node has been held yet, so there is nothing to make a trace of.")
    for line in lines:
        click.echo(line, file=output)


def _all_events(client: Connection) -> Iterator[EventView]:
    since = 0
    while page := client.events(since=since, limit=PAGE):
        yield from page
        since = page[-1].seq


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
    from malletrain.render import tables

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
        rows = tables.added_up(client.usage(**between), apart)
    if as_json:
        print_json(rows)
    elif as_csv:
        click.echo(tables.usage_csv(rows), nl=False)
    else:
        print_text(tables.usage(rows, apart))
