"""One lease as a Slurm job: the words of ``sbatch`` and of ``scancel``, and the batch script.

Nothing that comes from outside passes through a shell unquoted: options are arguments of their own,
and what the lease runs stands quoted in the batch script, which reaches sbatch through its standard
input. Decides how a lease is asked for, not when or where.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scavenger.batch import lease_script
from scavenger.batch.groups import name_of
from scavenger.batch.settings import BatchSettings
from scavenger.batch.submission import Dialect, LeaseSpec, Shrink, printed_id
from scavenger.hostlist import fold

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


def sbatch(
    settings: BatchSettings[SlurmLeaseOptions], spec: LeaseSpec, step: bool, memory_mb: int = 0
) -> list[str]:
    """The command that submits one lease; its script comes through standard input. ``step``: the
    agent runs as a job step. ``memory_mb``: of a whole node; 0: all that it has.
    """
    output = "/dev/null" if spec.output is None else _pattern(str(spec.output))
    where = [f"--nodelist={spec.node}", "--nodes=1", "--ntasks=1"]
    return _sbatch(settings, spec.name, where, output, spec, step, memory_mb)


def sbatch_shared(
    settings: BatchSettings[SlurmLeaseOptions],
    pack: Sequence[LeaseSpec],
    others: Collection[str],
    step: bool,
    memory_mb: int = 0,
) -> list[str]:
    """The command that submits one job for several leases: an array of a task for each, or a block.

    Slurm chooses among the nodes of these leases: those of a block that are to be had at once, so
    that none waits for another.

    Args:
        settings: of the site.
        pack: the leases.
        others: all other nodes where leases might run.
        step: the agents run as job steps.
        memory_mb: of a whole node; 0: all that it has.
    """
    name = name_of(one.lease for one in pack)
    where = [f"--exclude={fold(others)}"] if others else []
    if settings.shape == "array":
        where += [f"--array=0-{len(pack) - 1}", "--nodes=1", "--ntasks=1"]
    else:
        where += [f"--nodes=1-{len(pack)}", "--ntasks-per-node=1", "--no-kill"]
    shortest = min(pack, key=lambda one: one.limit_s)
    return _sbatch(
        settings, f"{settings.prefix}{name}", where, "/dev/null", shortest, step, memory_mb
    )


def _sbatch(
    settings: BatchSettings[SlurmLeaseOptions],
    name: str,
    where: Sequence[str],
    output: str,
    spec: LeaseSpec,
    step: bool,
    memory_mb: int,
) -> list[str]:
    options = settings.lease
    words = [
        "sbatch",
        "--parsable",
        f"--job-name={name}",
        *where,
        "--no-requeue",
        "--open-mode=append",
        f"--output={output}",
        "--input=/dev/null",
        "--chdir=/",
        f"--time={int(spec.limit_s // 60)}",
        f"--deadline=now+{int(spec.limit_s + settings.start_within_s) + 60}seconds",
        # To the batch script alone where that is the agent; to the steps, and so not to the shell
        # around srun, where a step is.
        f"--signal={'' if step else 'B:'}TERM@{max(1, min(65535, math.ceil(spec.grace_s)))}",
    ]
    if settings.time_min_s is not None and settings.time_min_s < spec.limit_s:
        words.append(f"--time-min={max(1, int(settings.time_min_s // 60))}")
    if options.exclusive:
        words += ["--exclusive", f"--mem={memory_mb}"]
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
    env = {**env, AS_STEP: "1" if step else ""}
    return lease_script.lease_script(
        template, lease_script.Part("", argv, env, keep_at_home=keep_at_home)
    )


def shared_script(
    settings: BatchSettings[SlurmLeaseOptions], pack: Sequence[LeaseSpec], step: bool
) -> bytes:
    """The batch script of an array or a block. Raises SchedulerError."""
    if settings.shape == "array":
        env = {AS_STEP: "1" if step else ""}
        parts = [one.part._replace(env={**one.env, **env}) for one in pack]
        return lease_script.shared_script(settings.template, NODE, parts)
    return block_script(settings.template, [one.part for one in pack])


def block_script(template: str, parts: Sequence[lease_script.Part]) -> bytes:
    """The batch script of a block. Raises SchedulerError."""
    chosen = "\n".join(lease_script.choice(BLOCK_NODE, parts))
    # Everybody on the node can read a command line, and the leases' keys are in it.
    argv = ["/bin/sh", "-c", f'eval "${BLOCK_TEXT}"']
    env = {AS_STEP: "", BLOCK_TEXT: BLOCK.replace(CHOICE, chosen)}
    return lease_script.lease_script(template, lease_script.Part("", argv, env))


def shrink(request: Shrink) -> list[str]:
    """The command that takes nodes from a running job."""
    return ["scontrol", "update", f"JobId={request.job}", f"NodeList={fold(request.remaining)}"]


NODE = "$SLURMD_NODENAME"
BLOCK_NODE = "$node"
AS_STEP = "MALLETRAIN_AS_STEP"
BLOCK_TEXT = "MALLETRAIN_BLOCK"
CHOICE = "#CHOICE"
BLOCK = f"""unset {BLOCK_TEXT}
counts= later=$SLURM_JOB_CPUS_PER_NODE,
while [ -n "$later" ]; do
    count=${{later%%,*}} later=${{later#*,}} times=1
    case $count in *"(x"*) times=${{count#*x}} times=${{times%")"}} count=${{count%%"("*}};; esac
    while [ "$times" -gt 0 ]; do counts="$counts $count" times=$((times - 1)); done
done
set -- $counts
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    cpus=${{1:-1}}
    if [ $# -gt 0 ]; then shift; fi
    (
{CHOICE}
export MALLETRAIN_NODE="$node"
exec srun --nodes=1 --ntasks=1 --nodelist="$node" --cpus-per-task="$cpus" --cpu-bind=none --mem=0 \\
    --input=none --unbuffered --quiet --export=ALL "$@"
    ) &
done
wait
"""
"""What the script of a block runs on its first node: an agent as a step of its own on each node, so
that one of them can be signalled, and its node given back, alone.
"""


_JOB_ID = (
    re.compile(r"(\d+)(?:;[\w.-]+)?"),
    re.compile(r"Submitted batch job (\d+)(?: on cluster \S+)?"),
)
"""What ``sbatch --parsable`` prints, and what a wrapper that drops ``--parsable`` does."""


def job_id(printed: str) -> str:
    """The job id that ``sbatch --parsable`` printed (``ID`` or ``ID;CLUSTER``). Raises
    SchedulerError.
    """
    return printed_id(printed, _JOB_ID, "sbatch")


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
    shrink=shrink,
)
"""What ``sbatch`` and ``scancel`` say."""
