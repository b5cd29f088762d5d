"""Leases as Slurm jobs: the arguments of ``sbatch`` and ``scancel``, the batch script, and which
job of Slurm belongs to which lease.

Input from outside never passes through a shell unquoted: options are separate arguments, and the
lease's command is quoted in the batch script, which sbatch reads from its standard input. Decides
how a lease is requested, not when or where.

:func:`split_by_lease` splits jobs of Slurm that leases share into one job for each lease. Of arrays
and blocks Slurm chooses the nodes among those for which leases were requested, so the node
identifies the lease. Pending tasks belong to all leases whose nodes have no task yet. A job that
has a whole host runs the lease of each of its slots.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scavenger.batch import lease_script
from scavenger.batch.groups import PartOf, leases_in, name_of, unknown
from scavenger.batch.settings import BatchSettings
from scavenger.batch.slots import CPUS, MEMORY_MB, Amounts
from scavenger.batch.submission import Dialect, LeaseSpec, Shrink, printed_id
from scavenger.hostlist import expand, fold
from scavenger.interface import host_of, kind_of
from scavenger.slurm.parse import SlurmJob

RUNNING_STATES = frozenset({"RUNNING", "SUSPENDED", "STOPPED"})


def split_by_lease(
    jobs: Iterable[SlurmJob],
    prefix: str,
    node_of: Callable[[str], str],
    users: Collection[str],
) -> list[SlurmJob]:
    """Return one job for each lease, named after it. Its ``id`` is that of the part that ends with
    the lease.

    Args:
        jobs: jobs whose names have the form of ours; any user can create such a job.
        prefix: beginning of their names.
        node_of: returns the node of a lease; empty if it is not known.
        users: users with leases. Jobs of other users are returned unchanged.
    """
    parts: list[SlurmJob] = []
    waiting: list[tuple[SlurmJob, tuple[str, ...]]] = []
    placed: set[str] = set()
    for job in jobs:
        name = job.name[len(prefix) :]
        leases = leases_in(name) if job.user in users else ()
        if not leases:
            parts.append(job)
        elif not job.node_list:
            waiting.append((job, leases))
        else:
            of_node = {node_of(lease): lease for lease in leases}
            placed_on = set(expand(job.node_list))
            of_slot = {
                slot: lease
                for slot, lease in of_node.items()
                if kind_of(slot) and host_of(slot) in placed_on
            }
            for slot, lease in of_slot.items():
                parts.append(_part(job, prefix + lease, slot, True))
            for node in expand(job.node_list) if not of_slot else ():
                # A node without a lease was forgotten by an earlier daemon; it is no longer needed.
                lease = of_node.get(node, unknown(name, node))
                placed.add(lease)
                parts.append(_part(job, prefix + lease, node, _is_block(job)))
    for job, leases in waiting:
        if job.state == "PENDING":
            parts += [
                _part(job, prefix + lease, node, False)
                for lease in leases
                if lease not in placed and (node := node_of(lease))
            ]
    return parts


def _is_block(job: SlurmJob) -> bool:
    return "_" not in job.id


def _part(job: SlurmJob, name: str, node: str, in_block: bool) -> SlurmJob:
    removable = in_block and job.state in RUNNING_STATES
    part = PartOf(job.id.partition("_")[0], node, node == job.batch_host, removable)
    node_list = job.node_list and node
    return job._replace(name=name, node_list=node_list, requested_nodes=node, part=part, nodes=1)


def in_slot(job: SlurmJob, node: str) -> SlurmJob:
    """Return one of our jobs with the name of its slot in place of its host.

    Args:
        job: the job.
        node: node or slot of its lease; empty if it is not known.
    """
    if not kind_of(node):
        return job
    is_placed = job.node_list == host_of(node)
    return job._replace(node_list=node if is_placed else job.node_list, requested_nodes=node)


Launch = Literal["auto", "batch", "step"]


@dataclass(frozen=True)
class SlurmLeaseOptions:
    """The site's settings for lease jobs."""

    partition: str = ""
    """Partitions of the leases, separated by commas; empty: the default one."""
    qos: str = ""
    """QOS of the leases; empty: the default one."""
    account: str = ""
    """Account of the leases; empty: the default one."""
    constraint: str = ""
    """``--constraint`` of sbatch."""
    exclusive: bool = True
    """Request the whole node with all its memory; otherwise ``gres`` and ``options`` decide."""
    gres: str = ""
    """``--gres`` of sbatch."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, one argument each."""
    nice: int = 0
    """``--nice`` of sbatch."""
    launch: Launch = "auto"
    """Whether the agent is the batch script itself or a job step; auto: whichever receives
    Slurm's preemption signal.
    """
    leave_at_limits: bool = False
    """See :mod:`scavenger.slurm.limits`."""

    @property
    def partitions(self) -> list[str]:
        """The partitions of the leases."""
        return [name for name in self.partition.split(",") if name]

    @property
    def main_partition(self) -> str:
        """The first of them; empty: Slurm's default partition."""
        return next(iter(self.partitions), "")


def sbatch(
    settings: BatchSettings[SlurmLeaseOptions],
    spec: LeaseSpec,
    step: bool,
    memory_mb: int = 0,
    cluster: str = "",
) -> list[str]:
    """Return the command that submits one lease. Its script is read from standard input.

    Args:
        settings: settings of the site.
        spec: the lease.
        step: whether the agent runs as a job step.
        memory_mb: memory to request on a whole node, MB; 0: all of it.
        cluster: cluster of a federation to submit to; empty: Slurm decides.
    """
    output = "/dev/null" if spec.output is None else _pattern(str(spec.output))
    where = [f"--nodelist={spec.host}", "--nodes=1", "--ntasks=1"]
    return _sbatch(
        settings, spec.name, [*of_cluster(cluster), *where], output, spec, step, memory_mb
    )


def sbatch_shared(
    settings: BatchSettings[SlurmLeaseOptions],
    pack: Sequence[LeaseSpec],
    others: Collection[str],
    step: bool,
    memory_mb: int = 0,
    cluster: str = "",
) -> list[str]:
    """Return the command that submits one job for several leases: an array with one task per lease,
    or a block.

    Slurm chooses among the nodes of these leases. For a block it chooses those that are available
    at once, so that no node waits for another.

    Args:
        settings: settings of the site.
        pack: the leases.
        others: all other nodes on which leases could run.
        step: whether the agents run as job steps.
        memory_mb: memory to request on a whole node, MB; 0: all of it.
        cluster: cluster of a federation to submit to; empty: Slurm decides.
    """
    name = name_of(one.lease for one in pack)
    where = [*of_cluster(cluster), *([f"--exclude={fold(others)}"] if others else [])]
    if settings.shape == "array":
        where += [f"--array=0-{len(pack) - 1}", "--nodes=1", "--ntasks=1"]
    else:
        where += [f"--nodes=1-{len(pack)}", "--ntasks-per-node=1", "--no-kill"]
    shortest = min(pack, key=lambda one: one.limit_s)
    return _sbatch(
        settings, f"{settings.prefix}{name}", where, "/dev/null", shortest, step, memory_mb
    )


def sbatch_host(
    settings: BatchSettings[SlurmLeaseOptions],
    pack: Sequence[LeaseSpec],
    memory_mb: int = 0,
    cluster: str = "",
) -> list[str]:
    """Return the command that submits one job of a whole host for the leases of its slots.

    Args:
        settings: settings of the site.
        pack: the leases, all on one host.
        memory_mb: memory to request, MB; 0: all of the host's.
        cluster: cluster of a federation to submit to; empty: Slurm decides.
    """
    shared = f"{settings.prefix}{name_of(one.lease for one in pack)}"
    name = pack[0].name if len(pack) == 1 else shared
    where = [*of_cluster(cluster), f"--nodelist={pack[0].host}", "--nodes=1", "--ntasks=1"]
    if (kind := pack[0].slot) is not None:
        where += _gres_options(kind.amounts, len(pack))
    shortest = min(pack, key=lambda one: one.limit_s)
    return _sbatch(settings, name, where, "/dev/null", shortest, True, memory_mb)


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
        # The signal goes to the batch script only if that is the agent. With a step it goes to the
        # steps, and not to the shell around srun.
        f"--signal={'' if step else 'B:'}TERM@{max(1, min(65535, math.ceil(spec.grace_s)))}",
    ]
    if settings.time_min_s is not None and settings.time_min_s < spec.limit_s:
        words.append(f"--time-min={max(1, int(settings.time_min_s // 60))}")
    if spec.slot is not None and not spec.slot.whole_host:
        words += slot_options(spec.slot.amounts)
    elif spec.slot is not None or options.exclusive:
        words += ["--exclusive", f"--mem={memory_mb}"]
    if options.nice:
        words.append(f"--nice={options.nice}")
    for option in ("partition", "qos", "account", "constraint", "gres"):
        if option == "gres" and spec.slot is not None:
            continue
        if value := getattr(options, option):
            words.append(f"--{option}={value}")
    return words + list(options.options)


def of_cluster(cluster: str) -> list[str]:
    """Return the option with which sbatch submits to one cluster of a federation only, and not to
    all, some of which may have nodes of the same names.
    """
    return [f"--clusters={cluster}"] if cluster else []


def slot_options(amounts: Amounts) -> list[str]:
    """Return the options of sbatch that request these amounts on one host."""
    words = [f"--cpus-per-task={amounts[CPUS]}", f"--mem={amounts[MEMORY_MB]}M"]
    return [*words, *_gres_options(amounts)]


def step_options(amounts: Amounts) -> list[str]:
    """Return the options of srun that request these amounts of a job. A step has all generic
    resources of its job if it names none (srun(1)).
    """
    words = slot_options(amounts)
    return words if _gres_options(amounts) else [*words, "--gres=none"]


def _gres_options(amounts: Amounts, slots: int = 1) -> list[str]:
    """Return the option that requests the generic resources of so many slots; none if they have
    none.
    """
    typed = {name.partition(":")[0] for name in amounts if ":" in name}
    gres = [
        f"{name}:{slots * amount}"
        for name, amount in amounts.items()
        if name not in (CPUS, MEMORY_MB) and name not in typed
    ]
    return [f"--gres={','.join(gres)}"] if gres else []


def batch_script(
    template: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    step: bool,
    keep_at_home: bool = False,
) -> bytes:
    """Return ``template`` with the lease inserted; see
    :func:`scavenger.batch.lease_script.lease_script`. Raises SchedulerError.

    Args:
        template: batch script of a lease.
        argv: command of the lease.
        env: environment variables to export.
        step: whether the agent runs as a job step.
        keep_at_home: whether the output is stored in the owner's home directory.
    """
    env = {**env, AS_STEP: "1" if step else ""}
    return lease_script.lease_script(
        template, lease_script.Part("", argv, env, keep_at_home=keep_at_home)
    )


def shared_script(
    settings: BatchSettings[SlurmLeaseOptions], pack: Sequence[LeaseSpec], step: bool
) -> bytes:
    """Return the batch script of an array or a block. Raises SchedulerError.

    Args:
        settings: settings of the site.
        pack: the leases.
        step: whether the agents run as job steps.
    """
    if settings.shape == "array":
        env = {AS_STEP: "1" if step else ""}
        parts = [one.part._replace(env={**one.env, **env}) for one in pack]
        return lease_script.shared_script(settings.template, NODE, parts)
    return block_script(settings.template, [one.part for one in pack])


def block_script(template: str, parts: Sequence[lease_script.Part]) -> bytes:
    """Return the batch script of a block. Raises SchedulerError."""
    chosen = "\n".join(lease_script.choice(BLOCK_NODE, parts))
    # All users on the node can read a command line, and the leases' keys are in it.
    argv = ["/bin/sh", "-c", f'eval "${BLOCK_TEXT}"']
    env = {AS_STEP: "", BLOCK_TEXT: BLOCK.replace(CHOICE, chosen)}
    return lease_script.lease_script(template, lease_script.Part("", argv, env))


def host_script(template: str, options: Sequence[str], parts: Sequence[lease_script.Part]) -> bytes:
    """Return the batch script of a job that has a whole host: it starts the agent of each slot as a
    step with the slot's part of the host. Raises SchedulerError.

    Args:
        template: batch script of a lease.
        options: options of srun that request what a slot has (:func:`step_options`).
        parts: the commands of the leases, with names of slots as their nodes.
    """
    head, to_choice, to_amounts, tail = host_pieces()
    slots = " ".join(lease_script.quote(one.node) for one in parts)
    chosen = "\n".join(lease_script.choice(HOST_SLOT, parts))
    amounts = " ".join(map(lease_script.quote, options))
    # In one pass: what is inserted is never searched for a place to insert.
    text = "".join([head, slots, to_choice, chosen, to_amounts, amounts, tail])
    argv = ["/bin/sh", "-c", f'eval "${BLOCK_TEXT}"']
    env = {AS_STEP: "", BLOCK_TEXT: text}
    return lease_script.lease_script(template, lease_script.Part("", argv, env))


def host_pieces() -> tuple[str, str, str, str]:
    """Return the pieces of HOST_TEXT: before the slots, between these and the choice, between that
    and the amounts, and after them.
    """
    head, rest = HOST_TEXT.split(SLOTS)
    to_choice, rest = rest.split(CHOICE)
    to_amounts, tail = rest.split(AMOUNTS)
    return head, to_choice, to_amounts, tail


def shrink(request: Shrink) -> list[str]:
    """Return the command that removes nodes from a running job."""
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
exec 4>&1
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    cpus=${{1:-1}}
    if [ $# -gt 0 ]; then shift; fi
    (
exec 5>&1 >&4 4>&-
{CHOICE}
export MALLETRAIN_NODE="$node"
exec srun --nodes=1 --ntasks=1 --nodelist="$node" --cpus-per-task="$cpus" --cpu-bind=none --mem=0 \\
    --input=none --unbuffered --quiet --export=ALL "$@"
    ) &
done | cat >/dev/null
"""
"""Script of a block on its first node. It starts the agent of each node as a separate step, so that
one of them can be signalled, and its node released, without the others.

Each srun has the pipe to ``cat`` open until it ends, as file 5, because the lines of its lease may
redirect its output to a file. The script does not use ``wait``: Slurm 25.05 starts it with SIGCHLD
blocked, and the ``wait`` of dash then never returns.
"""


HOST_SLOT = "$slot"
SLOTS, AMOUNTS = "#SLOTS", "#AMOUNTS"
HOST_TEXT = f"""unset {BLOCK_TEXT}
exec 4>&1
for slot in {SLOTS}; do
    (
exec 5>&1 >&4 4>&-
{CHOICE}
exec srun --nodes=1 --ntasks=1 --exact --job-name="$slot" {AMOUNTS} \\
    --input=none --unbuffered --quiet --export=ALL "$@"
    ) &
done | cat >/dev/null
"""
"""As BLOCK, for the slots of one host. ``--exact`` gives each step resources of its own
(srun(1)).
"""


_JOB_ID = (
    re.compile(r"(\d+)(?:;[\w.-]+)?"),
    re.compile(r"Submitted batch job (\d+)(?: on cluster \S+)?"),
)
"""The output of ``sbatch --parsable``, and that of a wrapper that drops ``--parsable``."""


def job_id(printed: str) -> str:
    """Return the job id in the output of ``sbatch --parsable`` (``ID`` or ``ID;CLUSTER``). Raises
    SchedulerError.
    """
    return printed_id(printed, _JOB_ID, "sbatch")


def _pattern(path: str) -> str:
    """Escape % in a path, which has a meaning in file names of sbatch."""
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
"""The commands and messages of Slurm."""
