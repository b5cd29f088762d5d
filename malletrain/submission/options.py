"""The options of a job: those that ``malletrain submit`` and ``malletrain map`` share, and those of
``malletrain submit`` alone.

The values are the texts of the command line. :mod:`malletrain.submission.spec` and
:mod:`malletrain.submission.farm` check them and build the job.

:func:`layout_choice` checks the layout of a node: processes, threads and loader workers, each a
number or to be found by measuring. Decides which jobs cannot have their layout measured, because it
would change their result or because nothing could be restarted. The daemon checks the same again,
and what only the running script shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from malletrain.protocol.bounds import MAX_PROCESSES
from malletrain.protocol.payloads import TUNABLE
from malletrain.submission.error import SpecError
from malletrain.submission.software import SoftwareOptions

AUTO = "auto"
Choice = int | str | None
"""A number, ``"auto"``, or None for the default."""


class LayoutChoice(NamedTuple):
    """The parts of a specification that concern the layout."""

    processes: int
    """Processes on each node; 0: one for each GPU, one without GPUs."""
    threads: int
    """Threads of each process; 0: the cores divided by the processes."""
    loader_workers: int
    """Loader workers of each process; 0: as the script has it."""
    tuned: tuple[str, ...]
    """Parts that are found by measuring."""


def layout_choice(
    processes: Choice,
    threads: Choice,
    loader_workers: Choice,
    *,
    mode: str,
    launcher: str,
    has_curve: bool,
    variables: Mapping[str, str],
) -> LayoutChoice:
    """Return the checked layout of a job.

    Args:
        processes: ``--nproc-per-node``.
        threads: ``--threads``.
        loader_workers: ``--loader-workers``.
        mode: the job's mode: ``restart``, ``live`` or ``service``.
        launcher: its launcher.
        has_curve: whether its owner gives a scaling curve.
        variables: its environment variables.

    Raises:
        SpecError: a value is neither a number nor ``auto``, or the job cannot have the layout.
    """
    numbers = (
        _number("nproc_per_node", processes, 1),
        _number("threads", threads, 1),
        _number("loader_workers", loader_workers, 0),
    )
    tuned = tuple(part for part, number in zip(TUNABLE, numbers, strict=True) if number is None)
    if tuned:
        _check_tuned(mode, launcher, has_curve)
    if threads is not None and variables.get("OMP_NUM_THREADS", "").strip():
        raise SpecError(
            "--threads and the variable OMP_NUM_THREADS both say how many threads a process has; "
            "leave one of them out.",
            "threads",
            "env",
        )
    own_processes, own_threads, own_loaders = (number or 0 for number in numbers)
    return LayoutChoice(own_processes, own_threads, own_loaders, tuned)


def _number(name: str, choice: Choice, least: int) -> int | None:
    """Return a number, 0 for the default, or None for ``auto``."""
    if choice is None:
        return 0
    if isinstance(choice, str):
        if choice.strip() == AUTO:
            return None
        choice = int(choice) if re.fullmatch(r"\s*[0-9]{1,9}\s*", choice) else choice
    if isinstance(choice, int) and least <= choice <= MAX_PROCESSES:
        return choice
    option = f"--{name.replace('_', '-')}"
    default = f" Leave {option} out for one on each GPU." if name == "nproc_per_node" else ""
    raise SpecError(
        f'{option}: "{choice}" is not possible; accepted is {least} or more, {MAX_PROCESSES} at '
        f"most, or auto.{default}",
        name,
    )


def _check_tuned(mode: str, launcher: str, has_curve: bool) -> None:
    """Raise SpecError if nothing can be found by measuring."""
    names = ("nproc_per_node", "threads", "loader_workers")
    if mode == "service":
        raise SpecError(
            "The layout of a service cannot be measured: it makes no steps. Give numbers instead "
            "of auto.",
            *names,
        )
    if launcher != "builtin":
        raise SpecError(
            "torchrun has one number of processes for the whole job, so the layout cannot be found "
            "by measuring. Give numbers instead of auto, or leave --launcher out.",
            *names,
            "launcher",
        )
    if has_curve:
        raise SpecError(
            "A given curve holds for one layout of the nodes. Give numbers instead of auto, or "
            "leave --curve out: then the curve is measured too.",
            *names,
            "curve",
        )


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of every job, script or farm."""

    name: str | None = None
    """Name of the job. None: from the name of its script or program."""
    nodes: str | None = None
    """Number of nodes, ``N`` or ``MIN:MAX``. None: 1, or the sizes of a service's value file. At
    most one of ``nodes``, ``slots`` and ``gpus`` is given."""
    slots: str | None = None
    """Number of slots, ``N`` or ``MIN:MAX``."""
    kind: str | None = None
    """Kind of slots, or class of nodes. None: any."""
    weight: float = 1.0
    """Factor on the value of nodes to this job, above 0."""
    setup: str | None = None
    """Shell command that runs first on each node."""
    env: Sequence[str] = ()
    """Environment variables, ``NAME=VALUE``, or ``NAME`` with the value that it has now."""
    workdir: str | None = None
    """Directory in which the job runs. None: the current one."""
    software: SoftwareOptions = field(default_factory=SoftwareOptions)
    """Modules, environment and container on the nodes."""
    after: Sequence[str] = ()
    """Jobs (ids or names) that must complete before this one starts."""
    time_limit: str | None = None
    """Maximum time with nodes, such as ``"90 min"``. None: no limit."""
    notify: Sequence[str] = ()
    """Recipients of notifications, each ``RECIPIENT`` or ``EVENT,...=RECIPIENT``."""
    deadline: str | None = None
    """Time by which the job is to complete."""
    budget: str | None = None
    """Maximum charged node-hours, such as ``"200nh"``."""


@dataclass(frozen=True, kw_only=True)
class ScriptOptions(JobOptions):
    """The options of a job that runs a script: a training or a service."""

    gpus: str | None = None
    """Number of GPUs, each a slot, ``N`` or ``MIN:MAX``."""
    as_module: bool = False
    """Whether the script is the name of a module, run as with ``python -m``."""
    launcher: str = "builtin"
    """``"builtin"`` or ``"torchrun"``."""
    live: bool = False
    """Whether the script uses malletrain.elastic."""
    on_hang: str = "tell"
    """Action when workers hang, ``"tell"`` or ``"restart"``."""

    nproc_per_node: Choice = None
    """Processes on each node, or ``"auto"``. None: one for each GPU."""
    threads: Choice = None
    """Threads of each process, or ``"auto"``. None: the cores divided by the processes."""
    loader_workers: Choice = None
    """Loader workers of each process, or ``"auto"``. None: none."""
    data_memory: str | None = None
    """Memory of each node for the script's DataCache, a percentage or a size."""

    goal: str | None = None
    """``"throughput"`` or ``"efficiency"``. None: the site's objective."""
    work: str | None = None
    """Total number of samples to train on."""
    curve: Path | None = None
    """File of the known scaling curve, nodes to samples/s."""
    profile: bool = True
    """Whether the scaling curve is measured while the job trains."""
    profile_sizes: str | None = None
    """Numbers of nodes to measure at, with commas between them."""
    profile_key: str | None = None
    """Jobs with the same key start from each other's curves."""
    model_size: str | None = None
    """Number of parameters, and after a comma the FLOPs per sample."""

    service: bool = False
    """Whether the script is a service: one process on each node, without an end."""
    value: Path | None = None
    """File of the value of nodes to a service, or ``auto``."""
    start_cost: str | None = None
    """Time until a service's process is ready: a duration, ``"auto"`` or ``"auto:DURATION"``."""
