"""``malletrain logs``: prints the output of a job's processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from malletrain.cli.common import (
    Refused,
    client_of,
    interruptible,
    job_names,
    jobs_go_on,
    json_option,
    print_json_line,
    say,
    state_dir_option,
)
from malletrain.cli.tasks import print_log
from malletrain.cli.wait import exit_code

if TYPE_CHECKING:
    from malletrain.client import Connection
    from malletrain.protocol.views import JobDetail, LogView

LIMIT_BYTES = 256 * 1024
ASSUMED_LINE_BYTES, MAX_TAIL_BYTES = 200, 1 << 30
"""Assumed length of a line, and maximum size of the end of a log that is read for its last
lines."""
PACE_S = 0.3


@click.command()
@click.argument("job", shell_complete=job_names())
@click.option(
    "-f",
    "--follow",
    is_flag=True,
    help="Continue as the job writes, over every rescale, until it has ended; exit code as above.",
)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="R",
    help="Global rank of the worker.",
)
@click.option(
    "--tail",
    type=click.IntRange(min=0),
    metavar="N",
    help="Only the last N lines of the present log; -f continues from there.",
)
@click.option(
    "--launcher",
    is_flag=True,
    help="The log of the launcher instead of a worker's: why workers did not start.",
)
@click.option(
    "--service", is_flag=True, help="The logs of a service's processes, one node after another."
)
@click.option(
    "--task",
    type=click.IntRange(min=0),
    metavar="N",
    help="The log of this task of a farm, where this host sees its file; else the end of the "
    "output of a failed one.",
)
@state_dir_option
@json_option
def logs(
    job: str,
    follow: bool,
    rank: int,
    tail: int | None,
    launcher: bool,
    service: bool,
    task: int | None,
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Print the log of JOB (id or name): standard output and errors of one rank, all rounds in
    order.

    \b
    Examples:
      malletrain logs train
      malletrain logs train -f --rank 3
      malletrain logs train --tail 20
      malletrain logs train --launcher
      malletrain logs study --task 17

    With --json, one object per piece: text, cursor, streams. Exit codes of -f: 0 the job completed,
    1 it failed, 3 it was cancelled.
    """
    if task is not None:
        with client_of(state_dir) as client:
            code = print_log(client, job, task, follow)
        click.get_current_context().exit(code)
    stream = "launcher" if launcher else "service" if service else f"rank{rank}"
    cursor, wrote, newline, code, name = "", False, True, 0, job
    followed: list[str] = []
    with client_of(state_dir) as client, interruptible(lambda: jobs_go_on(followed)):
        if follow:  # by its id, because the name may refer to another job by the time it has ended
            detail = client.job(job)
            _refuse_farm(detail, stream)
            job = detail.job.id
            followed += [job] if detail.job.ended is None else []
        if tail is not None:
            piece = _last_lines(client, job, stream, tail)
            cursor = piece.cursor
            if as_json:
                print_json_line(piece)
            sys.stdout.write("" if as_json else piece.text)
            sys.stdout.flush()
            wrote, newline = as_json or bool(piece.text), piece.text.endswith("\n")
        while tail is None or follow:
            sent_at = time.monotonic()
            piece = client.logs(
                job,
                stream=stream,
                cursor=cursor,
                limit=LIMIT_BYTES,
                wait_s=5.0 if follow and cursor else 0.0,
            )
            progressed = piece.cursor != cursor
            cursor = piece.cursor
            if as_json:
                if piece.text or not wrote:
                    print_json_line(piece)
                    wrote = True
            elif piece.text:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
                wrote, newline = True, piece.text.endswith("\n")
            if piece.more and progressed:
                continue
            if piece.ended or not (follow or piece.arriving):
                break
            if not progressed and time.monotonic() - sent_at < PACE_S:
                time.sleep(PACE_S)  # the daemon answered at once although there was no output
        if not wrote and tail != 0:
            _refuse_farm(client.job(job), stream)
        if follow:
            code = exit_code([client.job(job).job.state])
    if as_json:
        click.get_current_context().exit(code)
    if wrote and not newline and sys.stdout.isatty():
        sys.stdout.write("\n")
    if not wrote and tail != 0:
        others = ", ".join(s for s in piece.streams if s != stream)
        say(
            f"{name} has written nothing to {stream} yet"
            + (f"; there is output of {others}." if others else ".")
        )
    click.get_current_context().exit(code)


def _refuse_farm(detail: JobDetail, stream: str) -> None:
    """Raise Refused if the log of a rank is asked of a farm, which has none."""
    if detail.spec.get("farm") is not None and stream.startswith("rank"):
        name = detail.job.name
        raise Refused(
            f"{name} is a farm: malletrain logs {name} --task N prints the log of a task, and "
            f"malletrain tasks {name} lists them."
        )


def _last_lines(client: Connection, job: str, stream: str, lines: int) -> LogView:
    """Return the last ``lines`` of a log, with the cursor after them."""
    import msgspec

    size = max(LIMIT_BYTES, lines * ASSUMED_LINE_BYTES)
    while True:
        text, cursor = "", f"tail:{size}"
        while True:
            piece = client.logs(job, stream=stream, cursor=cursor, limit=LIMIT_BYTES)
            text, before, cursor = text + piece.text, cursor, piece.cursor
            if not piece.more or cursor == before:
                break
        all_lines = text.splitlines(keepends=True)
        if len(all_lines) > lines or len(text.encode()) < size // 2 or size >= MAX_TAIL_BYTES:
            tail = "".join(all_lines[max(0, len(all_lines) - lines) :])
            return msgspec.structs.replace(piece, text=tail)
        size *= 8  # the lines are longer than assumed
