"""Options of ``malletrain submit`` that stand at the head of the script, put among those of the
command line.

Decides what wins: an option that is given on the command line, with whatever it excludes;
``--env`` adds. Which lines count is decided in :mod:`malletrain.submission.directives`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from malletrain.cli.common import say

LINES = "malletrain.directives"
"""Under this key of a context's ``meta``: parameter → the line of the script that it comes from."""
NOT_OF_A_JOB = frozenset(("state_dir", "as_json", "help", "wait", "as_module"))
"""Options that are about the submission and not the job: not for a script to say."""
EXCLUDES = {
    "container": ("no_container", "conda"),
    "no_container": ("container", "container_runtime", "container_bind"),
    "conda": ("venv", "container"),
    "venv": ("conda",),
}
"""What of the script an option of the command line takes away with it."""
_LARGEST = 16 * 1024 * 1024


def apply_directives(command: click.Command, ctx: click.Context, script: str) -> None:
    """Put the options at the head of ``script`` into the parameters of ``ctx``.

    Raises:
        click.UsageError: a line cannot be read; the sentence names it.
    """
    from malletrain.submission.directives import directives
    from malletrain.submission.error import SpecError

    try:
        with open(Path(script).expanduser(), "rb") as file:
            text = file.read(_LARGEST).decode("utf-8", "replace")
    except OSError:
        return  # what is wrong with the script itself is said elsewhere
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
    """The line of the script that the first of these options comes from; None: none does."""
    lines: Mapping[str, int] = ctx.meta.get(LINES, {})
    return next((lines[name] for name in options if name in lines), None)


def _parameters(
    command: click.Command, ctx: click.Context, script: str, line: int, words: tuple[str, ...]
) -> dict[str, Any]:
    """The parameters that one line gives, converted as on the command line."""
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
    """Take over what the command line leaves open; returns where each parameter taken stands."""
    explicit = {
        name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    excluded = explicit.union(*(EXCLUDES.get(name, ()) for name in explicit)) - {"env"}
    taken: dict[str, int] = {}
    for name, value in values.items():
        if name not in excluded:
            own = ctx.params.get(name) if name in explicit else ()
            ctx.params[name] = (*value, *(own or ())) if isinstance(value, tuple) else value
            taken[name] = lines[name]
    return taken
