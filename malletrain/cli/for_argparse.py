"""Adds options of ``malletrain submit``, with the same names, help and meaning, to an argparse
parser: for commands of other packages that submit jobs with :class:`malletrain.Client`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, cast

import click

from malletrain.api.options import SubmitOptions as SubmitOptions
from malletrain.cli.submit import submit
from malletrain.submission.error import SpecError as SpecError
from malletrain.submission.spec import parse_env


def add_submit_options(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Add options to a parser, in a group of their own.

    Args:
        parser: the parser of the command.
        names: names of parameters of ``malletrain submit`` that are also keywords of
            :meth:`malletrain.Client.submit`, such as ``time_limit``.
    """
    group = parser.add_argument_group("the job, as for malletrain submit")
    options = {option.name: option for option in submit.params if isinstance(option, click.Option)}
    for name in names:
        option = options[name]
        more: dict[str, Any] = {"help": (option.help or "").replace("%", "%%")}
        if option.is_flag:
            more["action"] = "store_true"
        else:
            more["metavar"] = option.metavar
            more["action"] = "append" if option.multiple else "store"
        if isinstance(option.type, click.Choice):
            more["choices"] = list(option.type.choices)
        group.add_argument(*option.opts, dest=name, **more)


def submit_options_of(options: argparse.Namespace, names: Sequence[str]) -> SubmitOptions:
    """Return the options that the user gave, as keywords of :meth:`malletrain.Client.submit`.

    Args:
        options: the parsed command line.
        names: the names that :func:`add_submit_options` got.

    Raises:
        SpecError: a value of ``--env`` is invalid.
    """
    values = {name: getattr(options, name) for name in names if getattr(options, name)}
    if "env" in values:
        values["env"] = parse_env(values["env"])
    return cast("SubmitOptions", values)
