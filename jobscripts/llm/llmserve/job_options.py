"""The options of ``malletrain submit`` that ``llmserve batch`` has too: on which nodes its job
runs, in which environment, when, and who is notified. Their names, help and meaning are those of
that command.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, cast

import click

from malletrain.api.options import SubmitOptions
from malletrain.cli.submit import submit
from malletrain.submission.spec import parse_env

NAMES = (
    "kind",
    "setup",
    "module",
    "conda",
    "venv",
    "container",
    "no_container",
    "container_runtime",
    "container_bind",
    "env",
    "after",
    "time_limit",
    "budget",
    "notify",
)
"""Parameters of ``malletrain submit``, which are keywords of ``malletrain.Client.submit`` too."""
OTHER_PYTHON = ("venv", "conda", "container")
"""Those with which a job does not run with the Python that submits it."""


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser of another command."""
    group = parser.add_argument_group("the job, as for malletrain submit")
    options = {option.name: option for option in submit.params if isinstance(option, click.Option)}
    for name in NAMES:
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


def job_options_of(options: argparse.Namespace) -> SubmitOptions:
    """Returns the options that were given, as keywords of ``malletrain.Client.submit``.

    Args:
        options: of a parser with :func:`add_job_options`.

    Raises:
        malletrain.submission.error.SpecError: an ``--env`` is wrong.
    """
    values = {name: getattr(options, name) for name in NAMES if getattr(options, name)}
    if "env" in values:
        values["env"] = parse_env(values["env"])
    return cast("SubmitOptions", values)


def python_of(job: SubmitOptions) -> tuple[str, dict[str, str]] | None:
    """Returns the Python that runs a job on its nodes, and its environment variables; None if they
    are not known here: modules, conda, a container or a command before Python may change them.

    Args:
        job: keywords of ``malletrain.Client.submit``.
    """
    if any(job.get(name) for name in ("module", "conda", "container", "setup")):
        return None
    own = dict(os.environ)
    venv = job.get("venv")
    if venv:
        own.pop("PYTHONPATH", None)  # not passed on to another Python
    python = os.path.join(os.path.expanduser(venv), "bin", "python") if venv else sys.executable
    return python, {**own, **job.get("env", {})}
