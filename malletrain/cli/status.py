"""``malletrain status``, ``show`` and ``nodes``: the state of jobs and nodes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from malletrain.cli.common import (
    NOT_WATCHED,
    Refused,
    client_of,
    interruptible,
    job_names,
    json_option,
    past_time,
    print_json,
    print_json_line,
    print_text,
    state_dir_option,
)
from malletrain.cli.wait import EXIT_CODES, exit_code

if TYPE_CHECKING:
    from malletrain.client import Connection
    from malletrain.protocol.views import JobView

DEFAULT_ENDED, MAX_ENDED = 1000, 100_000
"""Maximum number of ended jobs that are shown: by default, and with ``--all``."""
STATES = ("queued", "profiling", "running", "suspended", "completed", "failed", "cancelled")
SORT: dict[str, Callable[[JobView], Any]] = {
    "id": lambda job: int(job.id[1:]),
    "name": lambda job: job.name,
    "owner": lambda job: job.owner,
    "submitted": lambda job: -job.submitted,
    "started": lambda job: -(job.started or 0.0),
    "ended": lambda job: -(job.ended or float("inf")),
    "nodes": lambda job: -len(job.nodes),
    "rate": lambda job: -job.rate,
    "samples": lambda job: -job.samples,
}
"""Value of ``--sort`` → sort key."""


def _states(text: str | None) -> tuple[str, ...]:
    """Return the states in the value of ``--state``."""
    words = tuple(word.strip() for word in (text or "").split(",") if word.strip())
    for word in words:
        if word not in STATES:
            raise click.BadParameter(f"'{word}' is no state; they are {', '.join(STATES)}.")
    return words


@click.command()
@click.argument("job", required=False, shell_complete=job_names())
@click.option(
    "--watch",
    is_flag=True,
    help="Show it again every two seconds until Ctrl-C, or until JOB has ended.",
)
@click.option(
    "--all",
    "every",
    is_flag=True,
    help=f"Show all jobs that ever ended, not only the newest {DEFAULT_ENDED:,}.",
)
@click.option(
    "--since",
    metavar="TIME",
    callback=lambda ctx, param, text: None if text is None else past_time(text),
    help='Only jobs that had not ended at that time: "2 d" ago, or 2026-01-31.',
)
@click.option(
    "--state",
    "states",
    metavar="STATE,...",
    callback=lambda ctx, param, text: _states(text),
    help="Only jobs in one of these states.",
)
@click.option("--owner", metavar="USER", help="Only jobs of this user.")
@click.option("--name", metavar="TEXT", help="Only jobs whose name contains this.")
@click.option(
    "--sort",
    type=click.Choice(sorted(SORT)),
    default="id",
    show_default=True,
    help="Sort key. All but id, name and owner begin with the largest value.",
)
@state_dir_option
@json_option
def status(
    job: str | None,
    watch: bool,
    every: bool,
    since: float | None,
    states: tuple[str, ...],
    owner: str | None,
    name: str | None,
    sort: str,
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Show the daemon and all jobs, or only JOB (id or name).

    The states of a job: queued, profiling, running, suspended (it has fewer nodes than its minimum
    and keeps its place), and at the end completed, failed or cancelled. Exit codes with JOB and
    --watch: 0 it completed, 1 it failed, 3 it was cancelled.

    \b
    Examples:
      malletrain status
      malletrain status train --watch
      malletrain status --all --since "7 d" --state failed,cancelled --sort ended
      malletrain status --json | jq '.jobs[] | {name, state, rate}'
    """
    from rich.text import Text

    from malletrain.render import tables

    with client_of(state_dir) as client:
        if watch:
            with interruptible(lambda: NOT_WATCHED):
                code = _watch(client, job, as_json)
            click.get_current_context().exit(code)
        now = client.status()
        every = every or since is not None
        jobs = (
            [client.job(job).job] if job else client.jobs(**({"ended": MAX_ENDED} if every else {}))
        )
    if not job:
        jobs = sorted(
            (
                j
                for j in jobs
                if (since is None or j.ended is None or j.ended >= since)
                and (not states or j.state in states)
                and (owner is None or j.owner == owner)
                and (name is None or name in j.name)
            ),
            key=SORT[sort],
        )
    if as_json:
        print_json(jobs[0] if job else {"status": now, "jobs": jobs})
    elif job:
        print_text(tables.jobs(jobs, now.now))
    else:
        print_text(tables.headline(now), Text(""), tables.jobs(jobs, now.now))


def _watch(client: Connection, job: str | None, as_json: bool, interval_s: float = 2.0) -> int:
    """Show the status until the job has ended. Return the exit code."""
    from rich.console import Group, RenderableType
    from rich.live import Live
    from rich.text import Text

    from malletrain.render import tables
    from malletrain.render.columns import console, redraws

    terminal = console()
    if job:  # by its id, because the name may refer to another job by the time it has ended
        job = client.job(job).job.id
    with Live(console=terminal, auto_refresh=False, transient=False) as live:
        while True:
            now = client.status()
            jobs = [client.job(job).job] if job else client.jobs()
            if as_json:
                print_json_line(jobs[0] if job else {"status": now, "jobs": jobs})
            else:
                picture: RenderableType = Group(
                    tables.headline(now), Text(""), tables.jobs(jobs, now.now)
                )
                if redraws(terminal):
                    live.update(picture, refresh=True)
                else:
                    terminal.print(picture)
            if job and jobs[0].state in EXIT_CODES:
                return exit_code([jobs[0].state])
            time.sleep(interval_s)


@click.command()
@click.argument("job", shell_complete=job_names())
@click.option(
    "--plot",
    "plots",
    metavar="METRIC",
    multiple=True,
    help="Instead plot this metric of the script over time; once for each.",
)
@click.option(
    "--over",
    type=click.Choice(["time", "samples", "step"]),
    default="samples",
    show_default=True,
    help="Horizontal axis of --plot: time, samples processed, or the script's own step.",
)
@state_dir_option
@json_option
def show(
    job: str, plots: tuple[str, ...], over: str, state_dir: Path | None, as_json: bool
) -> None:
    """Show everything about JOB (id or name).

    Its script and limits, its scaling curve and profile, each rescale with its cost and phases,
    notices, and for a failed job the last lines of the log of the rank that failed first.

    \b
    Examples:
      malletrain show train
      malletrain show train --plot loss --over time
    """
    from malletrain.client import ClientError, operations
    from malletrain.render import farms, job_detail

    if plots:
        _plot(job, plots, over, state_dir, as_json)
        return
    with client_of(state_dir) as client:
        detail = client.job(job)
        view = None
        if detail.spec.get("farm") is not None:
            with contextlib.suppress(ClientError):  # the tasks of others are not shown
                view = client.do(operations.tasks(detail.job.id, limit=0))
    if as_json:
        print_json(detail)
        return
    print_text(job_detail.job(detail))
    if view is not None:
        print_text(farms.farm(view, time.time()))


def _plot(
    job: str, names: tuple[str, ...], over: str, state_dir: Path | None, as_json: bool
) -> None:
    """Plot metrics over time."""
    from malletrain.render.columns import console
    from malletrain.render.text import curve

    with client_of(state_dir) as client:
        by_name = {series.name: series for series in client.metrics(job)}
    if missing := [name for name in names if name not in by_name]:
        available = f"it has {', '.join(sorted(by_name))}" if by_name else "it has none yet"
        raise Refused(f"{job} has reported no metric {missing[0]!r}; {available}.")
    if as_json:
        print_json([by_name[name] for name in names])
        return
    width = min(console().width, 120)
    print_text(*(curve(by_name[name], over=over, width=width) for name in names))


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
