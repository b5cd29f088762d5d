"""Jobs that Slurm is about to start: which idle nodes to leave them, and which leases to give up
for them.

Slurm lets a job preempt just as many leases as it lacks nodes, and counts on the idle ones without
saying so (seen with 22.05). A lease that takes one of those makes it preempt again, which it does
not for up to 30 s. It does say which jobs it means to start: they wait for resources, and their
expected start is now, or was. This module counts what each of them needs: idle nodes are left alone
for it, and where too few are open, because something took one all the same, leases are asked to
leave as a preemption would ask them. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from scavenger.batch.rules import NodeFacts
from scavenger.hostlist import expand
from scavenger.slurm.parse import SlurmJob
from scavenger.slurm.site import SlurmSite

WAITING_REASONS = frozenset({"Resources", "Priority", "None"})
"""Reasons (squeue(1), "JOB REASON CODES") of a job that waits for nodes and for nothing else."""
PUT_OFF = "BeginTime"
"""Why a job waits that must not begin before some time: its owner's (--begin), or Slurm's own."""
PATIENCE_S = 2.0
"""A job may be found lacking nodes for a moment while Slurm is just starting it."""
BELIEVED_S = 60.0
"""So long is a job believed to be about to start. What keeps it from starting after that is none of
our doing, so that it must not keep nodes from being used for ever.
"""
AT_ONCE = 100
"""Jobs looked at in one poll at most; Slurm starts the first ones first."""


_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


class Claims(NamedTuple):
    """What due jobs need."""

    node_holds: dict[str, str]
    """Idle node → why no lease may use it."""
    lacked: dict[str, list[str]]
    """Job id → leases that it lacks to start."""
    nodes: set[str]
    """All nodes that due jobs count on: idle ones, those that come free, and those of the leases in
    ``lacked``.
    """


def due_jobs(
    pending: Sequence[SlurmJob],
    site: SlurmSite,
    lease_partition: str,
    now: float,
    before: Collection[str] = (),
) -> list[SlurmJob]:
    """Jobs of partitions above that of the leases which could have started by now, as Slurm itself
    expects. Where QOS decide who preempts whom, of every partition.

    The components of a heterogeneous job are one job, which needs the nodes of all of them: Slurm
    starts them together or not at all. While it collects nodes it puts off a component for half a
    minute (reason BeginTime), so that a job that was due stays so meanwhile.

    Args:
        pending: jobs that wait.
        site: the Slurm.
        lease_partition: of the leases.
        now: epoch seconds.
        before: the jobs that were due at the last look.
    """
    own = site.partitions.get(lease_partition)
    tier = own.tier if own is not None and site.preempt_type == "partition_prio" else -1
    jobs: dict[str, list[SlurmJob]] = {}
    for job in pending:
        jobs.setdefault(job.id.partition("+")[0], []).append(job)
    return [
        _as_one(name, parts)
        for name, parts in jobs.items()
        if any(
            p in site.partitions and site.partitions[p].tier > tier
            for part in parts
            for p in part.partition.split(",")
        )
        and all(part.reason in WAITING_REASONS or part.reason == PUT_OFF for part in parts)
        and (
            any(_expected(part, now) for part in parts)
            or (was_due(name, before) and any(_put_off(part, now) for part in parts))
        )
    ]


def _expected(job: SlurmJob, now: float) -> bool:
    begun = job.start is not None and job.start <= now + 1.0
    return begun and job.reason in WAITING_REASONS and bool(job.planned_on)


def was_due(name: str, before: Collection[str]) -> bool:
    """Whether a job is among those of ``before``. Tasks of an array that wait share a line of
    squeue, ``7_[0-3%2]``, until Slurm collects nodes for one of them, ``7_0``.
    """
    array, _, task = name.partition("_")
    lines = [entry.partition("_")[2] for entry in before if entry.startswith(f"{array}_[")]
    return name in before or (bool(task) and any(_has_task(line, task) for line in lines))


def tasks_at_once(name: str) -> int:
    """How many tasks a line of squeue stands for that may start at the same time: ``7_[0-3,7%2]``
    for 2, a line that is cut short (``...``) for those that it names at least; any other for 1.
    """
    listed, _, limit = name.partition("_[")[2].rstrip("]").partition("%")
    number = sum(
        len(range(int(low), int(high or low) + 1, int(step or 1)))
        for low, high, step in _RANGE.findall(listed)
    )
    return max(1, min(number, int(limit)) if limit.isdecimal() and int(limit) else number)


def _has_task(line: str, task: str) -> bool:
    """Whether ``[0-3,7%2]`` has this task, or is the line of those that wait still. A long line is
    cut short (``...``) and may have any.
    """
    if not task.isdecimal() or "..." in line:
        return True
    number = int(task)
    for low, high, step in _RANGE.findall(line.partition("%")[0]):
        first, last = int(low), int(high or low)
        if first <= number <= last and (number - first) % int(step or 1) == 0:
            return True
    return False


def _put_off(job: SlurmJob, now: float) -> bool:
    return job.reason == PUT_OFF and (job.start is None or job.start <= now + BELIEVED_S)


def _as_one(name: str, parts: Sequence[SlurmJob]) -> SlurmJob:
    if len(parts) == 1:
        return parts[0]._replace(id=name)
    partitions = dict.fromkeys(p for part in parts for p in part.partition.split(","))
    return parts[0]._replace(
        id=name,
        partition=",".join(partitions),
        nodes=sum(part.nodes for part in parts),
        planned_on=",".join(part.planned_on for part in parts if part.planned_on),
    )


def claims(
    due: Sequence[SlurmJob],
    facts: Mapping[str, NodeFacts],
    leases: Mapping[str, str],
    leaving: Collection[str],
) -> Claims:
    """What each due job needs, one after the other.

    ``leases``: lease id → node, of the running ones; ``leaving``: those among them that are on
    their way out. Nodes that come free count before idle ones, planned ones before others, and
    those of leaving leases before others that come free: Slurm may have preempted them for it.
    A job that could not start even with all leases, or on whose planned nodes there is none, waits
    for something else.
    """
    coming = dict.fromkeys(
        (
            *sorted(leases[lease] for lease in leaving if lease in leases),
            *(name for name, node in facts.items() if node.state.startswith("completing")),
        )
    )
    idle = dict.fromkeys(
        sorted(
            name
            for name, node in facts.items()
            if node.idle and not node.trouble and not node.reserved
        )
    )
    offered = {
        node: lease
        for lease, node in sorted(leases.items(), key=lambda lease: lease[1])
        if lease not in leaving
    }
    result = Claims({}, {}, set())
    for job in due[:AT_ONCE]:
        tasks = tasks_at_once(job.id)
        partitions, planned = set(job.partition.split(",")), expand(job.planned_on)
        first = set(planned)
        # A job that names a number of tasks only is listed with one node.
        needed = max(job.nodes, len(planned)) if job.nodes == 1 else job.nodes
        free = (*_first(coming, first), *_first(idle, first))
        can = [name for name in free if _in(facts, name, partitions)]
        give = [name for name in _first(offered, first) if _in(facts, name, partitions)]
        short = needed - len(can)
        if short > 0:
            if len(give) < short or first.isdisjoint(give):
                continue
            result.lacked[job.id] = [offered.pop(name) for name in give[:short]]
            result.nodes.update(give[:short])
        # Slurm preempts for several tasks in one go, for as many as leases and open nodes make.
        startable = min(tasks, (len(can) + len(give)) // max(1, needed))
        taken = set(can[: needed * max(1, startable)])
        nodes = f"{needed} node{'s' if needed > 1 else ''}"
        why = f"Slurm is about to start job {job.id}, which needs {nodes}"
        if tasks > 1:
            why += f" for each of {tasks} tasks"
        result.node_holds.update(dict.fromkeys(taken & idle.keys(), why))
        result.nodes.update(taken)
        for name in taken:
            coming.pop(name, None)
            idle.pop(name, None)
    return result


def _first(names: Collection[str], first: Collection[str]) -> list[str]:
    """``names``, those in ``first`` before the others."""
    return [name for name in names if name in first] + [name for name in names if name not in first]


def _in(facts: Mapping[str, NodeFacts], name: str, partitions: set[str]) -> bool:
    return name in facts and not partitions.isdisjoint(facts[name].partitions)
