"""The layout of a node in a job's specification: processes, threads and loader workers, each a
number or to be found by measuring.

Decides which jobs cannot have their layout measured, because it would change their result or
because nothing could be restarted. The daemon checks the same again, and what only the running
script shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from malletrain.protocol.bounds import MAX_PROCESSES
from malletrain.protocol.payloads import TUNABLE
from malletrain.submission.error import SpecError

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
