"""Options that ``malletrain submit`` and ``malletrain map`` share: the name of a job, its weight,
its environment, when it starts and ends, and who is notified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from malletrain.cli.common import conda_environments, files, folders, job_names

F = TypeVar("F", bound=Callable[..., Any])

RUNTIMES = ("apptainer", "singularity", "podman-hpc", "charliecloud", "enroot", "podman")


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
