"""Merges the ``#MALLETRAIN`` lines at the head of a script with the options of the command line.

Decides precedence: an option on the command line overrides the script's, and those that it
excludes; ``--env`` adds. :mod:`malletrain.submission.directives` decides which lines are
directives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

from malletrain.cli.common import say

LINES = "malletrain.directives"
"""Key of a context's ``meta``: parameter → the line of the script that set it."""
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
        raise click.UsageError(f"{script} line {line}: {error.format_message()}", ctx) from None
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
