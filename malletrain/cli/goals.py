"""``malletrain extend``, and the options of ``malletrain submit`` for deadline, budget and work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from malletrain.cli.common import (
    client_of,
    job_names,
    json_option,
    print_json,
    say,
    state_dir_option,
)

F = TypeVar("F", bound=Callable[..., Any])


def goal_options(command: F) -> F:
    """Add ``--deadline``, ``--budget`` and ``--work``."""
    work = click.option(
        "--work",
        metavar="SAMPLES",
        help="Total number of samples to train on. Default: from the script's sampler.epochs(N).",
    )
    return deadline_and_budget_options(work(command))


def deadline_and_budget_options(command: F) -> F:
    """Add ``--deadline`` and ``--budget``."""
    for option in (
        click.option(
            "--budget",
            metavar="Nnh",
            help="Maximum charged node-hours of the job, such as 200nh. When they are spent, the "
            "job is suspended; it does not fail.",
        ),
        click.option(
            "--deadline",
            metavar="TIME",
            help='Time by which the job is to complete: "friday 18:00", "tomorrow 08:00", "18:00" '
            '(the next such time, local), 2026-12-01T08:00, or "in 6 h". A day alone means its '
            "beginning.",
        ),
    ):
        command = option(command)
    return command


def tell_goal(goal: Any) -> None:
    """Print the forecast of a job's end, and the standing of its goals."""
    import time

    from malletrain.render.goals import sentence

    if goal is not None and (text := sentence(goal, time.time())):
        click.echo(text)


@click.command()
@click.argument("job", shell_complete=job_names(unfinished=True))
@goal_options
@state_dir_option
@json_option
def extend(
    job: str,
    deadline: str | None,
    budget: str | None,
    work: str | None,
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Give JOB (id or name) another deadline, budget or amount of work.

    A job whose budget was spent continues. "+50nh" adds to the current budget; "none" removes a
    goal.

    \b
    Examples:
      malletrain extend train --budget +50nh
      malletrain extend train --deadline "in 2 d"
      malletrain extend train --deadline "friday 18:00"
      malletrain extend train --deadline none
    """
    from malletrain.submission.error import SpecError
    from malletrain.submission.goals import changes_of

    try:
        changes = changes_of(deadline, budget, work)
    except SpecError as error:
        raise click.UsageError(str(error)) from None
    with client_of(state_dir) as client:
        view = client.extend(job, **changes)
    if as_json:
        print_json(view)
        return
    say(f"Job {view.id} ({view.name}) now has its new goals.")
    tell_goal(view.goal)
