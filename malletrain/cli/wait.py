"""``malletrain wait``: waits until jobs have ended. Also the exit codes of all commands that wait
for that: ``wait``, ``logs -f`` and ``status JOB --watch``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from malletrain.cli.common import (
    DaemonBusy,
    DaemonUnreachable,
    client_of,
    interruptible,
    job_names,
    jobs_go_on,
    json_option,
    print_json,
    say,
    state_dir_option,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from malletrain.client import Connection
    from malletrain.protocol.views import JobView


COMPLETED, FAILED, CANCELLED = 0, 1, 3
"""2 means a wrong command line."""
EXIT_CODES = {"completed": COMPLETED, "cancelled": CANCELLED, "failed": FAILED}
"""State of an ended job → exit code."""


def exit_code(states: Iterable[str]) -> int:
    """Return the exit code for ended jobs: 1 if one failed, else 3 if one was cancelled,
    else 0."""
    codes = {EXIT_CODES[state] for state in states}
    return FAILED if FAILED in codes else max(codes, default=COMPLETED)


def exit_code_of_failed(failures: Iterable[Any]) -> int:
    """Return the exit code for one failed job: that of the worker that failed first in the last
    try.

    Args:
        failures: events of the kind ``workers-failed`` of the job, oldest first.

    Returns:
        The worker's exit code; 128 and the signal's number if a signal killed it, as in a shell; 1
        if it is unknown.
    """
    codes = [event.data.get("exit_code") for event in failures]
    if not codes or not isinstance(codes[-1], int):
        return FAILED
    return 128 - codes[-1] if codes[-1] < 0 else codes[-1] or FAILED


RETRY_INTERVAL_S = 2.0
"""Time between two attempts to reach a daemon that is gone, seconds; the first pause if it is busy.
"""
MAX_INTERVAL_S = 30.0
"""Longest pause between two requests to a daemon that is busy, seconds."""
T = TypeVar("T")


@click.command()
@click.argument(
    "jobs",
    nargs=-1,
    required=True,
    metavar="JOB...",
    shell_complete=job_names(unfinished=True),
)
@state_dir_option
@json_option
def wait(jobs: tuple[str, ...], state_dir: Path | None, as_json: bool) -> None:
    """Wait until every JOB (id or name) has ended.

    Exit codes: 0 all completed, 1 one failed (or was not found), 3 one was cancelled and none
    failed. If the daemon restarts meanwhile, the command waits for it.

    \b
    Examples:
      malletrain wait train && python evaluate.py
      malletrain wait j3 j4 j5
    """
    # A name may refer to another job by the time this one has ended.
    job_ids = _answer(
        state_dir, lambda client: list(dict.fromkeys(client.job(job).job.id for job in jobs))
    )
    ended = until_ended(job_ids, state_dir, quiet=as_json)
    if as_json:
        print_json(ended)
    click.get_current_context().exit(exit_code(view.state for view in ended))


def until_ended(jobs: Sequence[str], state_dir: Path | None, *, quiet: bool) -> list[JobView]:
    """Wait until the jobs with these ids have ended and, unless ``quiet``, report each when it
    ends. Return them in the order in which they ended. If the daemon restarts, or is busy, waits
    for it.
    """
    ended: dict[str, JobView] = {}
    waiting = list(jobs)

    def wait_for_all(client: Connection) -> None:
        since = -1
        while waiting:
            for job in list(waiting):
                view = client.job(job).job
                if view.state in EXIT_CODES:
                    waiting.remove(job)
                    ended[job] = view
                    if not quiet:
                        why = f": {view.reason}" if view.reason else "."
                        click.echo(f"Job {view.id} ({view.name}) {_words(view.state)}{why}")
            if waiting:
                news = client.events(since=since, job=waiting[0], limit=1000, wait_s=5.0)
                since = news[-1].seq if news else since

    away = False
    with interruptible(lambda: jobs_go_on(waiting)):
        while waiting:
            try:
                _answer(state_dir, wait_for_all)
            except DaemonUnreachable as error:
                if not away:
                    say(f"{error.format_message()} Waiting for it to come back.")
                away = True
                time.sleep(RETRY_INTERVAL_S)
    return list(ended.values())


def _answer(state_dir: Path | None, ask: Callable[[Connection], T]) -> T:
    """Return what ``ask`` returns. While too many requests of this user wait, as with many commands
    that wait for jobs, it is called again.
    """
    from scavenger.backoff import doubled_s

    refusals = 0
    while True:
        try:
            with client_of(state_dir) as client:
                return ask(client)
        except DaemonBusy as error:
            if not refusals:
                say(f"{error.format_message()} The command asks again.")
            pause_s = doubled_s(RETRY_INTERVAL_S, refusals, MAX_INTERVAL_S)
            time.sleep(random.uniform(pause_s / 2, pause_s))
            refusals += 1


def _words(state: str) -> str:
    return f"was {state}" if state == "cancelled" else state
