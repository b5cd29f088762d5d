"""``malletrain events``: the audit trail."""

from __future__ import annotations

from pathlib import Path

import click

from malletrain.cli.common import asking, json_option, print_json_line, print_text, state_dir_option

PAGE = 1000


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Go on as things happen, until Ctrl-C.")
@click.option("--job", metavar="JOB", help="Only events of this job (id or name).")
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
@state_dir_option
@json_option
def events(
    follow: bool,
    job: str | None,
    last: int | None,
    since: int,
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Print everything that happened to nodes, leases and jobs, oldest first.

    With --json, one event a line: seq, time, kind, job, node, lease, sentence, data.

    \b
    Examples:
      malletrain events --job train
      malletrain events --last 20 --follow
      malletrain events --json > audit.jsonl
    """
    from malletrain.render import tables

    with asking(state_dir) as client:
        names = {} if as_json else {j.id: j.name for j in client.jobs()}
        since = -last if last else since
        while True:
            page = client.events(since=since, limit=PAGE, job=job, wait_s=5.0 if follow else 0.0)
            if not as_json and any(e.job and e.job not in names for e in page):
                names = {j.id: j.name for j in client.jobs()}
            for event in page:
                if as_json:
                    print_json_line(event)
                else:
                    print_text(tables.event(event, names))
            complete = len(page) < PAGE or since < 0
            since = page[-1].seq if page else max(0, since)
            if not follow and complete:
                return
