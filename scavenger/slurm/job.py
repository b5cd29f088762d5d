"""One lease as a Slurm job: the words of ``sbatch`` and of ``scancel``, and the batch script.

Nothing that comes from outside passes through a shell unquoted: options are arguments of their own,
and what the lease runs stands quoted in the batch script, which reaches sbatch through its standard
input. Decides how a lease is asked for, not when or where.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scavenger.batch import lease_script
from scavenger.batch.settings import BatchSettings
from scavenger.batch.submission import Dialect, Wanted
from scavenger.interface import SchedulerError

Launch = Literal["auto", "batch", "step"]


@dataclass(frozen=True)
class SlurmLeaseOptions:
    """How the site wants its lease jobs.

    ``exclusive``: the whole node, with all its memory; else what ``gres`` and ``options`` say.
    ``options``: further options of sbatch, one argument each. ``launch``: how the agent is started:
    as the batch script itself, as a job step, or whichever Slurm's preemption signal reaches.
    ``leave_at_limits``: see :mod:`scavenger.slurm.limits`.
    """

    partition: str = ""
    qos: str = ""
    account: str = ""
    constraint: str = ""
    exclusive: bool = True
    gres: str = ""
    options: tuple[str, ...] = ()
    nice: int = 0
    launch: Launch = "auto"
    leave_at_limits: bool = False

    @property
    def partitions(self) -> list[str]:
        """The partitions of the leases."""
        return [name for name in self.partition.split(",") if name]

    @property
    def main_partition(self) -> str:
        """The first of them; empty: Slurm's default one."""
        return next(iter(self.partitions), "")


def sbatch(settings: BatchSettings[SlurmLeaseOptions], wanted: Wanted, step: bool) -> list[str]:
    """The command that submits one lease; its script comes through standard input. ``step``: the
    agent runs as a job step.
    """
    options = settings.lease
    output = "/dev/null" if wanted.output is None else _pattern(str(wanted.output))
    words = [
        "sbatch",
        "--parsable",
        f"--job-name={wanted.name}",
        f"--nodelist={wanted.node}",
        "--nodes=1",
        "--ntasks=1",
        "--no-requeue",
        "--open-mode=append",
        f"--output={output}",
        "--input=/dev/null",
        "--chdir=/",
        f"--time={int(wanted.limit_s // 60)}",
        f"--deadline=now+{int(wanted.limit_s + settings.start_within_s) + 60}seconds",
        # To the batch script alone where that is the agent; to the steps, and so not to the shell
        # around srun, where a step is.
        f"--signal={'' if step else 'B:'}TERM@{max(1, min(65535, math.ceil(wanted.grace_s)))}",
    ]
    if settings.time_min_s is not None and settings.time_min_s < wanted.limit_s:
        words.append(f"--time-min={max(1, int(settings.time_min_s // 60))}")
    if options.exclusive:
        words += ["--exclusive", "--mem=0"]
    if options.nice:
        words.append(f"--nice={options.nice}")
    for option in ("partition", "qos", "account", "constraint", "gres"):
        if value := getattr(options, option):
            words.append(f"--{option}={value}")
    return words + list(options.options)


def batch_script(
    template: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    step: bool,
    keep_at_home: bool = False,
) -> bytes:
    """``template`` with the lease in it; see :func:`scavenger.batch.lease_script.lease_script`.
    Raises SchedulerError.
    """
    return lease_script.lease_script(
        template, argv, {**env, "MALLETRAIN_AS_STEP": "1" if step else ""}, keep_at_home
    )


def job_id(printed: str) -> str:
    """The job id that ``sbatch --parsable`` printed (``ID`` or ``ID;CLUSTER``). Raises
    SchedulerError.
    """
    # A site's submit filter may print lines of its own before it.
    last = printed.strip().splitlines()[-1] if printed.strip() else ""
    number = last.partition(";")[0].strip()
    if not number.isdecimal():
        raise SchedulerError(f'sbatch answered "{last[:80]}", which is no job id.')
    return number


def _pattern(path: str) -> str:
    """A path without the meaning that % has in file names of sbatch."""
    return path.replace("%", "%%")


SLURM = Dialect(
    job_id=job_id,
    limit_reached=re.compile(
        r"MaxSubmit|MaxJobs|job submit limit|submit.*limit|too many jobs",
        re.IGNORECASE,
    ),
    unsure=re.compile(
        r"timed? ?out|Unable to contact|Connection|Communication|Zero Bytes|transmission",
        re.IGNORECASE,
    ),
    ended=re.compile(r"Invalid job id|already complet", re.IGNORECASE),
    cancel="scancel",
    at_once=200,
)
"""What ``sbatch`` and ``scancel`` say."""
