"""``malletrain tasks`` shows the tasks of a farm, ``malletrain retry`` queues failed ones again;
``malletrain logs --task`` prints the log of one.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from malletrain.cli.common import (
    Refused,
    client_of,
    files,
    interruptible,
    job_names,
    jobs_go_on,
    json_option,
    print_json,
    print_json_line,
    print_text,
    say,
    state_dir_option,
)
from malletrain.cli.wait import EXIT_CODES, exit_code
from malletrain.protocol.counting import counted

if TYPE_CHECKING:
    from malletrain.client import Connection
    from malletrain.protocol.views import TasksView, TaskView

PAGE = 1000
"""Number of tasks in one request."""
SHOWN = 50
"""Number of tasks that are shown by default."""
INTERVAL_S = 2.0
"""Time between two looks with ``--follow``, seconds."""


@click.command()
@click.argument("farm", shell_complete=job_names())
@click.option("--failed", "state", flag_value="failed", help="Only tasks that failed for good.")
@click.option("--running", "state", flag_value="running", help="Only tasks that run.")
@click.option("--waiting", "state", flag_value="waiting", help="Only tasks that wait.")
@click.option("--done", "state", flag_value="done", help="Only tasks that are done.")
@click.option(
    "--cancelled",
    "state",
    flag_value="cancelled",
    help="Only tasks that had not ended when the farm ended.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=SHOWN,
    show_default=True,
    metavar="N",
    help="Maximum number of tasks in the table.",
)
@click.option(
    "--csv",
    "csv_file",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    shell_complete=files,
    help="Write all these tasks to a CSV file (- is the standard output): values, states, exit "
    "codes, nodes, times. malletrain map --tasks reads it.",
)
@click.option(
    "--follow",
    is_flag=True,
    help="Show the counts until the farm has ended; exit code as that of 'malletrain wait'.",
)
@state_dir_option
@json_option
def tasks(
    farm: str,
    state: str | None,
    limit: int,
    csv_file: str | None,
    follow: bool,
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Show the tasks of FARM (id or name): how many are in which state, when they will be done, and
    a line for each.

    \b
    Examples:
      malletrain tasks study --follow
      malletrain tasks study --failed
      malletrain tasks study --failed --csv failed.csv
      malletrain tasks study --csv - | head
    """
    from malletrain.render import farms

    with client_of(state_dir) as client:
        if follow:
            click.get_current_context().exit(_follow(client, farm, as_json))
        if csv_file is not None:
            count = _write_csv(client, farm, state or "", csv_file)
            if csv_file != "-":
                say(f"Wrote {counted(count, 'task')} to {csv_file}.")
            return
        view = _listed(client, farm, state or "", limit)
    if as_json:
        print_json(view)
        return
    now = time.time()
    print_text(farms.summary(view, now))
    if view.tasks:
        click.echo()
        print_text(farms.tasks(view, now))
    total = view.counts.get(state, 0) if state else sum(view.counts.values())
    if limit and total > len(view.tasks):
        say(f"{total - len(view.tasks):,} more; --limit N shows more, --csv FILE writes all.")


def pages(client: Connection, farm: str, state: str) -> Iterator[TasksView]:
    """Yield the tasks of a farm in this state (empty: any), in order, a page at a time."""
    from malletrain.client import operations

    after = -1
    while True:
        view = client.do(operations.tasks(farm, state=state, after=after, limit=PAGE))
        yield view
        if not view.tasks:
            return
        after, farm = view.tasks[-1].number, view.job


def _listed(client: Connection, farm: str, state: str, limit: int) -> TasksView:
    """Return a view with at most ``limit`` tasks."""
    import msgspec

    from malletrain.client import operations

    view = client.do(operations.tasks(farm, state=state, limit=min(limit, PAGE)))
    rows = list(view.tasks)
    while rows and len(rows) < limit:
        after = rows[-1].number
        more = client.do(
            operations.tasks(view.job, state=state, after=after, limit=min(limit - len(rows), PAGE))
        )
        if not more.tasks:
            break
        rows += more.tasks
    return msgspec.structs.replace(view, tasks=tuple(rows))


def _write_csv(client: Connection, farm: str, state: str, name: str) -> int:
    """Write tasks to a file as CSV. Return their number."""
    from malletrain.render import farms

    count = 0
    with _opened(name) as file:
        writer = csv.writer(file, lineterminator="\n")
        for page in pages(client, farm, state):
            if not count:
                writer.writerow(farms.csv_header(page.columns))
                columns = page.columns
            if not page.tasks:
                break
            now = time.time()
            writer.writerows(farms.csv_row(columns, task, now) for task in page.tasks)
            count += len(page.tasks)
    return count


@contextlib.contextmanager
def _opened(name: str) -> Iterator[IO[str]]:
    if name == "-":
        yield sys.stdout
        return
    try:
        with open(Path(name).expanduser(), "w", encoding="utf-8", newline="") as file:
            yield file
    except OSError as error:
        raise Refused(f"{name} cannot be written: {error.strerror}.") from None


def _follow(client: Connection, farm: str, as_json: bool) -> int:
    """Show the counts until the farm has ended. Return the exit code."""
    from rich.live import Live

    from malletrain.client import operations
    from malletrain.render import farms
    from malletrain.render.columns import console, redraws

    terminal, shown = console(), ""
    farm = client.job(farm).job.id
    going_on = interruptible(lambda: jobs_go_on([farm]))
    with going_on, Live(console=terminal, auto_refresh=False) as live:
        while True:
            job = client.job(farm).job  # before the tasks, so that the last counts are final
            view = client.do(operations.tasks(farm, limit=0))
            line = farms.summary(view, time.time())
            if as_json:
                print_json_line(view)
            elif redraws(terminal):
                live.update(line, refresh=True)
            elif str(view.counts) != shown:
                shown = str(view.counts)
                click.echo(line.plain)
            if job.state in EXIT_CODES:
                break
            time.sleep(INTERVAL_S)
    if not as_json and job.reason:
        click.echo(f"Job {job.id} ({job.name}) {job.state}: {job.reason}")
    return exit_code([job.state])


@click.command()
@click.argument("farm", shell_complete=job_names(unfinished=True))
@click.argument("numbers", nargs=-1, type=click.IntRange(min=0), metavar="[N]...")
@click.option("--failed", is_flag=True, help="All tasks that failed for good.")
@state_dir_option
@json_option
def retry(
    farm: str, numbers: tuple[int, ...], failed: bool, state_dir: Path | None, as_json: bool
) -> None:
    """Put failed tasks of the unfinished FARM (id or name) back into its queue: those with these
    numbers, or all.

    The rows of a farm that has ended are read again: malletrain tasks FARM --failed --csv
    failed.csv, and malletrain map --tasks failed.csv.

    \b
    Examples:
      malletrain retry study --failed
      malletrain retry study 17 23
    """
    from malletrain.client import operations

    if failed == bool(numbers):
        raise click.UsageError("Give the numbers of failed tasks, or --failed for all.")
    with client_of(state_dir) as client:
        count = client.do(operations.retry(farm, numbers=numbers, state="failed" if failed else ""))
    if as_json:
        print_json({"retried": count})
        return
    click.echo(f"{count:,} task{' is' if count == 1 else 's are'} tried again.")


def print_log(client: Connection, farm: str, number: int, follow: bool) -> int:
    """Print the log of a task: its file where this host sees it, else the end of the output that
    the daemon has. With ``follow``, until the task has ended. Return the exit code.
    """
    detail = client.job(farm)
    job, position = detail.job.id, 0
    with interruptible(lambda: jobs_go_on([job] if follow else [])):
        while True:
            task = _task(client, job, number)
            path = _log_file(str(detail.spec.get("workdir", "")), task)
            text, position = _read(path, position)
            sys.stdout.write(text)
            sys.stdout.flush()
            if task.state in ("done", "failed", "cancelled") or not follow:
                break
            time.sleep(INTERVAL_S / 4)
    if not position:
        if task.tail:
            say(f"{task.log} is not on this host; this is the end of the output:")
            click.echo(task.tail)
        elif task.state in ("waiting", "cancelled"):
            say(f"Task {number} is {task.state}, and has written nothing.")
        elif not os.path.exists(path):
            say(f"{path} is not on this host; read it on node {task.node} or a host that sees it.")
    if not follow:
        return 0
    return exit_code(["completed" if task.state == "done" else task.state])


def _task(client: Connection, farm: str, number: int) -> TaskView:
    from malletrain.client import operations

    view = client.do(operations.tasks(farm, after=number - 1, limit=1))
    if not view.tasks or view.tasks[0].number != number:
        raise Refused(f"{farm} has no task {number}; it has 0 to {view.total - 1}.")
    return view.tasks[0]


def _log_file(workdir: str, task: TaskView) -> str:
    """Return the file of a task's output: while it runs, a hidden one beside the log."""
    path = os.path.join(workdir, task.log)
    if not task.log:
        return ""
    folder, name = os.path.split(path)
    parts = glob.glob(os.path.join(glob.escape(folder), f".{glob.escape(name)}.*.part"))
    if task.state == "running" and parts:
        return max(parts, key=_changed)
    return path


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _read(path: str, position: int) -> tuple[str, int]:
    """Return what a file has after a position, and the position after that."""
    try:
        with open(path, "rb") as file:
            file.seek(position)
            data = file.read()
    except OSError:
        return "", position
    return data.decode(errors="replace"), position + len(data)
