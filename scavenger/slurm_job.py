"""One lease as a Slurm job: its name, its batch script, and the words of ``sbatch``.

Nothing that comes from outside passes through a shell unquoted: options are arguments of their own, and what the lease runs stands quoted
in the batch script, which reaches sbatch through its standard input. Decides how a lease is asked for, not when or where.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scavenger import lease_script
from scavenger.interface import SchedulerError

LEAST_LIMIT_S = 60.0
"""Slurm counts time limits in whole minutes."""

Launch = Literal["auto", "batch", "step"]


@dataclass(frozen=True)
class LeaseOptions:
    """How the site wants its lease jobs.

    ``exclusive``: the whole node, with all its memory; else what ``gres`` and ``options`` say. ``options``: further options of sbatch, one
    argument each. ``time_limit_s``: the longest lease; ``time_min_s``: the shortest that is of use (``--time-min``), None where Slurm need
    not fit leases in. ``grace_s``: seconds between the preemption signal and SIGKILL, None: what Slurm's configuration says. ``launch``:
    how the agent is started: as the batch script itself, as a job step, or whichever Slurm's preemption signal reaches. ``submit_as``:
    command put before sbatch and scancel for another owner, with ``{owner}`` in it. ``output_dir``: where the output of leases goes;
    None: nowhere.
    """

    partition: str = ""
    qos: str = ""
    account: str = ""
    constraint: str = ""
    exclusive: bool = True
    gres: str = ""
    options: tuple[str, ...] = ()
    time_limit_s: float = 12 * 3600.0
    time_min_s: float | None = None
    nice: int = 0
    grace_s: float | None = None
    launch: Launch = "auto"
    submit_as: tuple[str, ...] = ()
    output_dir: Path | None = None


def limit_of(options: LeaseOptions, free_s: float | None, spare_s: float) -> float | None:
    """Time limit in seconds (whole minutes) of a lease on a node that is free for ``free_s`` more (None: no end known), ``spare_s`` of
    which stay unused. None: too short to be of use."""
    limit = options.time_limit_s if free_s is None else min(options.time_limit_s, free_s - spare_s)
    limit = math.floor(limit / 60.0 + 1e-9) * 60.0
    least = max(LEAST_LIMIT_S, options.time_min_s or 0.0)
    return limit if limit >= min(least, options.time_limit_s) and limit > 0 else None


def sbatch(
    options: LeaseOptions, *, name: str, node: str, lease: str, limit_s: float, start_within_s: float, grace_s: float, step: bool, log: bool
) -> list[str]:
    """The command that submits one lease; its script comes through standard input. ``step``: the agent runs as a job step; ``log``: keep
    the output (the submitting user's files)."""
    output = str(options.output_dir / f"{lease}.out") if log and options.output_dir is not None else "/dev/null"
    minutes = int(limit_s // 60)
    words = [
        "sbatch", "--parsable", f"--job-name={name}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--no-requeue", "--open-mode=append",
        f"--output={_pattern(output)}", "--input=/dev/null", "--chdir=/", f"--time={minutes}",
        f"--deadline=now+{int(limit_s + start_within_s) + 60}seconds",
        # To the batch script alone where that is the agent; to the steps, and so not to the shell around srun, where a step is.
        f"--signal={'' if step else 'B:'}TERM@{max(1, min(65535, math.ceil(grace_s)))}",
    ]  # fmt: skip
    if options.time_min_s is not None and options.time_min_s < limit_s:
        words.append(f"--time-min={max(1, int(options.time_min_s // 60))}")
    if options.exclusive:
        words += ["--exclusive", "--mem=0"]
    if options.nice:
        words.append(f"--nice={options.nice}")
    for option in ("partition", "qos", "account", "constraint", "gres"):
        if value := getattr(options, option):
            words.append(f"--{option}={value}")
    return words + list(options.options)


def batch_script(template: str, argv: Sequence[str], env: Mapping[str, str], step: bool) -> bytes:
    """``template`` with the lease in it; see :func:`scavenger.lease_script.lease_script`. Raises SchedulerError."""
    return lease_script.lease_script(template, argv, {**env, "MALLETRAIN_AS_STEP": "1" if step else ""})


def job_id(printed: str) -> str:
    """The job id that ``sbatch --parsable`` printed (``ID`` or ``ID;CLUSTER``). Raises SchedulerError."""
    # A site's submit filter may print lines of its own before it.
    last = printed.strip().splitlines()[-1] if printed.strip() else ""
    number = last.partition(";")[0].strip()
    if not number.isdecimal():
        raise SchedulerError(f'sbatch answered "{last[:80]}", which is no job id.')
    return number


def _pattern(path: str) -> str:
    """A path without the meaning that % has in file names of sbatch."""
    return path.replace("%", "%%")
