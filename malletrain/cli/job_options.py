"""Options of a job on the command line that ``malletrain submit`` and ``malletrain map`` share: the
name of a job, its weight, its goals, its environment, when it starts and ends, and who is notified.

:func:`apply_directives` merges the ``#MALLETRAIN`` lines at the head of a script with them. It
decides precedence: an option on the command line overrides the script's, and those that it
excludes; ``--env`` adds. :mod:`malletrain.submission.directives` decides which lines are
directives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from malletrain.cli.common import (
    conda_environments,
    files,
    folders,
    job_names,
    say,
    usage_sentence,
)

F = TypeVar("F", bound=Callable[..., Any])

RUNTIMES = ("apptainer", "singularity", "podman-hpc", "charliecloud", "enroot", "podman")
LINES = "malletrain.directives"
"""Key of a context's ``meta``: parameter → the line of the script that set it."""


def name_option(command: F) -> F:
    """Add ``--name``."""
    return click.option(
        "--name", help="Name of the job. Default: the script's name without its suffix."
    )(command)


def slots_option(command: F) -> F:
    """Add ``--slots``."""
    return click.option(
        "--slots",
        metavar="MIN:MAX",
        help="Slots the job can use, where the site leases parts of shared nodes: N, or MIN:MAX. "
        "They are of --kind, or of the site's only kind. In place of --nodes.",
    )(command)


def kind_option(command: F) -> F:
    """Add ``--kind``."""
    return click.option(
        "--kind",
        metavar="KIND",
        help="Kind of slots, or class of nodes, on which the job runs, such as gpu. Default: "
        "any, all "
        "nodes of one class.",
    )(command)


def weight_option(command: F) -> F:
    """Add ``--weight``."""
    return click.option(
        "--weight",
        metavar="W",
        type=float,
        default=1.0,
        show_default=True,
        help="How much the job counts beside the others.",
    )(command)


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


def environment_options(command: F) -> F:
    """Add ``--setup`` to ``--workdir``: what a process finds when it starts."""
    for option in reversed(
        (
            click.option(
                "--setup",
                metavar="CMD",
                help="Shell command run before Python on each node, in the container if there is "
                "one, such as "
                '"ulimit -n 65536".',
            ),
            click.option(
                "--module",
                metavar="NAME",
                multiple=True,
                help="Load this environment module on each node before Python starts; once for "
                "each.",
            ),
            click.option(
                "--conda",
                metavar="ENV",
                shell_complete=conda_environments,
                help="Run in this conda environment, by name or path, with its Python.",
            ),
            click.option(
                "--venv",
                metavar="DIR",
                shell_complete=folders,
                help="Run in this virtual environment, with its Python.",
            ),
            click.option(
                "--container",
                metavar="IMAGE",
                shell_complete=files,
                help="Run in this container image, with its Python: a file, a directory, or a "
                "name that the "
                "runtime knows. Default: the site's image.",
            ),
            click.option(
                "--no-container",
                is_flag=True,
                help="Run without a container, even if the site configures one.",
            ),
            click.option(
                "--container-runtime",
                type=click.Choice(RUNTIMES),
                help="Container runtime. Default: the site's, else the first that the node has.",
            ),
            click.option(
                "--container-bind",
                metavar="SRC[:DST]",
                multiple=True,
                help="Additional path of the node that the container sees. The working "
                "directory, the "
                "script's and your home are always visible.",
            ),
            click.option(
                "--env",
                metavar="K=V",
                multiple=True,
                help="Environment variable of the script; K alone passes on its current value.",
            ),
            click.option(
                "--workdir",
                metavar="DIR",
                type=click.Path(),
                help="Directory the script runs in. Default: the current directory.",
            ),
        )
    ):
        command = option(command)
    return command


def start_and_end_options(command: F) -> F:
    """Add ``--after`` and ``--time-limit``."""
    for option in reversed(
        (
            click.option(
                "--after",
                metavar="JOB",
                multiple=True,
                shell_complete=job_names(unfinished=True),
                help="Start only after this job (id or name) has completed; once for each. If "
                "one fails or is "
                "cancelled, this job is cancelled.",
            ),
            click.option(
                "--time-limit",
                metavar="TIME",
                help='Maximum time with nodes, after which the job is cancelled, such as "90 min".',
            ),
        )
    ):
        command = option(command)
    return command


def notify_option(command: F) -> F:
    """Add ``--notify``."""
    return click.option(
        "--notify",
        metavar="WHOM",
        multiple=True,
        help="Notify of the job's start, end and failure, and of a deadline or budget at risk: a "
        "mail "
        "address, the https:// address of a web hook, or command:CMD on the daemon's host. Only "
        "some events: end,failure,at-risk=WHOM.",
    )(command)


NOT_OF_A_JOB = frozenset(("state_dir", "as_json", "help", "wait", "as_module", "dry_run"))
"""Options of the submission and not of the job, which a script cannot set."""
EXCLUDES = {
    "container": ("no_container", "conda"),
    "no_container": ("container", "container_runtime", "container_bind"),
    "conda": ("venv", "container"),
    "venv": ("conda",),
    "tasks": ("each", "array"),
    "each": ("tasks", "array"),
}
"""Option on the command line → options of the script that it overrides as well."""
SIZES = {"submit": ("nodes", "slots", "gpus"), "map": ("nodes", "slots")}
"""Command → options for the size of a job; one of them on the command line overrides all of the
script's.
"""


def apply_directives(command: click.Command, ctx: click.Context, script: str, text: str) -> None:
    """Put the options at the head of a script into the parameters of ``ctx``.

    Args:
        command: the command whose options they are.
        ctx: its context, with the parameters of the command line.
        script: name of the script.
        text: its text.

    Raises:
        click.UsageError: a line cannot be read; the sentence names it.
    """
    from malletrain.submission.directives import directives
    from malletrain.submission.error import SpecError

    try:
        directive_lines, late = directives(text, script)
    except SpecError as error:
        raise click.UsageError(str(error), ctx) from None
    for number in late:
        say(
            f"Note: {script} line {number} is not read as options, because it stands after the "
            "first statement; #MALLETRAIN lines stand at the head of the script."
        )
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for directive in directive_lines:
        for name, value in _parameters(
            command, ctx, script, directive.line, directive.words
        ).items():
            values[name] = (*values.get(name, ()), *value) if isinstance(value, tuple) else value
            lines[name] = directive.line
    ctx.meta[LINES] = _merge(ctx, values, lines)


def line_of(ctx: click.Context, options: tuple[str, ...]) -> int | None:
    """Return the line of the script that set the first of these options; None if none did."""
    lines: Mapping[str, int] = ctx.meta.get(LINES, {})
    return next((lines[name] for name in options if name in lines), None)


def _parameters(
    command: click.Command, ctx: click.Context, script: str, line: int, words: tuple[str, ...]
) -> dict[str, Any]:
    """Return the parameters that one line sets, converted as on the command line."""
    options: list[click.Parameter] = [
        param
        for param in command.params
        if isinstance(param, click.Option) and param.name not in NOT_OF_A_JOB
    ]
    reader = click.Command(command.name, params=options, add_help_option=False)
    try:
        inner = reader.make_context(command.name, list(words))
    except click.UsageError as error:
        raise click.UsageError(f"{script} line {line}: {usage_sentence(error)}", ctx) from None
    return {
        name: value
        for name, value in inner.params.items()
        if inner.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }


def _merge(ctx: click.Context, values: dict[str, Any], lines: dict[str, int]) -> dict[str, int]:
    """Set the parameters that the command line does not set; return the line of each."""
    explicit = {
        name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    excluded = explicit.union(*(EXCLUDES.get(name, ()) for name in explicit)) - {"env"}
    sizes = SIZES.get(ctx.command.name or "", ())
    if not explicit.isdisjoint(sizes):
        excluded = excluded.union(sizes)
    line_by_name: dict[str, int] = {}
    for name, value in values.items():
        if name not in excluded:
            value_on_command_line = ctx.params.get(name) if name in explicit else ()
            ctx.params[name] = (
                (*value, *(value_on_command_line or ())) if isinstance(value, tuple) else value
            )
            line_by_name[name] = lines[name]
    return line_by_name
