"""Jobs that Slurm is about to start: which idle nodes are left to them, and which leases are given
up for them.

Slurm lets a job preempt only as many leases as it lacks nodes, and counts on idle nodes without
showing it (observed with 22.05). If a lease takes one of these nodes, Slurm has to preempt again,
which takes up to 30 s. Slurm does show which jobs it plans to start: they wait for resources, and
their expected start is now or in the past. This module counts the nodes that each of them needs.
Idle nodes are left alone for it. If too few are open, because a lease took one anyway, leases are
asked to leave as in a preemption. Slurm 22.05 itself preempts too few leases for a job that it
plans on a node of which a lease is just leaving for another job.

A job that needs leases to leave one after the other waits for one grace time in all:
:func:`leave_by` decides how much of it is left for each lease. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from scavenger.batch.rules import NodeFacts
from scavenger.hostlist import expand
from scavenger.interface import host_of
from scavenger.slurm.parse import SlurmJob
from scavenger.slurm.site import SlurmSite

WAITING_REASONS = frozenset(
    {
        "Resources",
        "Priority",
        "None",
        # Since Slurm 26.05 in place of Resources (slurm_errno.c, ESLURM_TOPO_…).
        "Exceeded maximum node limit during topology allocation",
        "Insufficient resources in topology unit",
        "No available nodes in topology",
        "No suitable topology unit found",
        "No suitable topology unit found for segment",
        "Required nodes do not fit topology",
        "Required nodes lack available resources",
        "Weight-based selection could not satisfy request within topology unit",
    }
)
"""Reasons (squeue(1), "JOB REASON CODES") of a job that waits only for nodes."""
DELAYED_REASON = "BeginTime"
"""Reason of a job that must not begin before some time: the owner's (--begin), or Slurm's own."""
MAX_LACK_S = 2.0
"""Time for which a job may lack nodes before leases leave for it, seconds. A job can lack nodes
briefly while Slurm starts it.
"""
MAX_DUE_S = 60.0
"""Maximum time for which a job counts as about to start, seconds. After that something else keeps
it from starting, and it must not block nodes for ever.
"""
MAX_DUE_JOBS = 100
"""Maximum number of jobs considered in one poll. Slurm starts the first ones first."""


_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


class Claims(NamedTuple):
    """The nodes that due jobs need."""

    node_holds: dict[str, str]
    """Idle node → why no lease may use it."""
    needed_leases: dict[str, list[str]]
    """Job id → leases whose nodes it needs to start."""
    nodes: set[str]
    """All nodes that due jobs count on: idle ones, those that become free, and those of the leases
    in ``needed_leases``.
    """


def due_jobs(
    pending: Sequence[SlurmJob],
    site: SlurmSite,
    lease_partition: str,
    now: float,
    previous: Collection[str] = (),
) -> list[SlurmJob]:
    """Return the jobs in partitions above that of the leases that Slurm expects to have started by
    now. If the QOS decides which job preempts which, jobs of all partitions count.

    The components of a heterogeneous job are one job that needs the nodes of all of them, because
    Slurm starts them together or not at all. While Slurm collects nodes, it delays a component by
    half a minute (reason BeginTime). A job that was due stays due meanwhile.

    Args:
        pending: pending jobs.
        site: the Slurm site.
        lease_partition: partition of the leases.
        now: epoch seconds.
        previous: jobs that were due at the last poll.
    """
    lease_partition_info = site.partitions.get(lease_partition)
    tier = (
        lease_partition_info.tier
        if lease_partition_info is not None and site.preempt_type == "partition_prio"
        else -1
    )
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
        and all(part.reason in WAITING_REASONS or part.reason == DELAYED_REASON for part in parts)
        and (
            any(_is_expected(part, now) for part in parts)
            or (was_due(name, previous) and any(_is_delayed(part, now) for part in parts))
        )
    ]


def _is_expected(job: SlurmJob, now: float) -> bool:
    begun = job.start is not None and job.start <= now + 1.0
    return begun and job.reason in WAITING_REASONS and bool(job.planned_on)


def was_due(name: str, previous: Collection[str]) -> bool:
    """Return whether a job is in ``previous``. Pending tasks of an array share a line of squeue,
    ``7_[0-3%2]``, until Slurm collects nodes for one of them, ``7_0``.
    """
    array, _, task = name.partition("_")
    lines = [entry.partition("_")[2] for entry in previous if entry.startswith(f"{array}_[")]
    return name in previous or (bool(task) and any(_has_task(line, task) for line in lines))


def tasks_at_once(name: str) -> int:
    """Return the number of tasks of a squeue line that can start at the same time: 2 for
    ``7_[0-3,7%2]``; for a truncated line (``...``) at least the tasks that it names; 1 for any
    other line.
    """
    listed, _, limit = name.partition("_[")[2].rstrip("]").partition("%")
    number = sum(
        len(range(int(low), int(high or low) + 1, int(step or 1)))
        for low, high, step in _RANGE.findall(listed)
    )
    return max(1, min(number, int(limit)) if limit.isdecimal() and int(limit) else number)


def _has_task(line: str, task: str) -> bool:
    """Return whether ``[0-3,7%2]`` contains this task, or the task is the line of the pending
    tasks. A long line is truncated (``...``) and may contain any task.
    """
    if not task.isdecimal() or "..." in line:
        return True
    number = int(task)
    for low, high, step in _RANGE.findall(line.partition("%")[0]):
        first, last = int(low), int(high or low)
        if first <= number <= last and (number - first) % int(step or 1) == 0:
            return True
    return False


def _is_delayed(job: SlurmJob, now: float) -> bool:
    return job.reason == DELAYED_REASON and (job.start is None or job.start <= now + MAX_DUE_S)


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
    """Return the nodes that each due job needs, one job after the other.

    Nodes that become free are used before idle ones, planned nodes before others, and nodes of
    leaving leases before others that become free, because Slurm may have preempted these leases for
    the job. A job that could not start even on the nodes of all leases waits for something else,
    and so does a job that has planned nodes of which none has a lease or is claimed by a job before
    it.

    Args:
        due: the due jobs.
        facts: node → its facts.
        leases: running lease → its node.
        leaving: the leases among them that are leaving.
    """
    becoming_free = dict.fromkeys(
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
    for job in due[:MAX_DUE_JOBS]:
        tasks = tasks_at_once(job.id)
        partitions, planned = set(job.partition.split(",")), expand(job.planned_on)
        planned_nodes = set(planned)
        # A job that specifies only a number of tasks is listed with one node.
        node_count = max(job.nodes, len(planned)) if job.nodes == 1 else job.nodes
        available = (
            *_sorted_by_membership(becoming_free, planned_nodes),
            *_sorted_by_membership(idle, planned_nodes),
        )
        usable = [name for name in available if _is_in_partition(facts, name, partitions)]
        lease_nodes = [
            name
            for name in _sorted_by_membership(offered, planned_nodes)
            if _is_in_partition(facts, name, partitions)
        ]
        missing = node_count - len(usable)
        if missing > 0:
            ours = {*leases.values(), *result.nodes}
            if len(lease_nodes) < missing or planned_nodes.isdisjoint(ours):
                continue
            result.needed_leases[job.id] = [offered.pop(name) for name in lease_nodes[:missing]]
            result.nodes.update(lease_nodes[:missing])
        # Slurm preempts for several tasks at once, for as many as leases and open nodes allow.
        startable = min(tasks, (len(usable) + len(lease_nodes)) // max(1, node_count))
        claimed = set(usable[: node_count * max(1, startable)])
        nodes = f"{node_count} node{'s' if node_count > 1 else ''}"
        reason = f"Slurm is about to start job {job.id}, which needs {nodes}"
        if tasks > 1:
            reason += f" for each of {tasks} tasks"
        result.node_holds.update(dict.fromkeys(claimed & idle.keys(), reason))
        result.nodes.update(claimed)
        for name in claimed:
            becoming_free.pop(name, None)
            idle.pop(name, None)
    return result


def leave_by(
    due: Sequence[SlurmJob],
    due_since: Mapping[str, float],
    needed_leases: Mapping[str, Collection[str]],
    leaving: Mapping[str, str],
    grace_s: float,
    previous: Mapping[str, float],
) -> dict[str, float]:
    """Return lease → time by which it should have left, epoch seconds: one grace time after the job
    for which it leaves was first about to start. The job has waited since then, so that a lease
    that leaves later has less time.

    A lease leaves for the jobs that need it, and for those that Slurm plans on its node.

    Args:
        due: the due jobs.
        due_since: id of a due job → time since which it is due, epoch seconds.
        needed_leases: id of a due job → leases that it needs.
        leaving: lease that is leaving → its node or slot.
        grace_s: grace time of a preempted lease, seconds.
        previous: the result of the last poll. It holds for the leases that are still leaving, for
            the job may be planned on other nodes by now.
    """
    times = {lease: previous[lease] for lease in leaving if lease in previous}
    leases_of: dict[str, list[str]] = {}
    for lease, node in leaving.items():
        leases_of.setdefault(host_of(node), []).append(lease)
    for job in due[:MAX_DUE_JOBS]:
        planned = (lease for host in expand(job.planned_on) for lease in leases_of.get(host, ()))
        for lease in (*needed_leases.get(job.id, ()), *planned):
            until = due_since[job.id] + grace_s
            times[lease] = min(until, times.get(lease, until))
    return times


def slot_claims(
    due: Sequence[SlurmJob],
    facts: Mapping[str, NodeFacts],
    leases: Mapping[str, str],
    leaving: Collection[str],
) -> Claims:
    """Return the slots that due jobs need, where leases are slots.

    The nodes on which Slurm plans a job are known, the amounts that it needs there are not. So all
    idle slots of these nodes are left to it. If the job still waits after :data:`MAX_LACK_S`, one
    lease leaves on each of these nodes that has leases and none that leaves already.

    Args:
        due: the due jobs.
        facts: slot → its facts.
        leases: running lease → its slot.
        leaving: the leases among them that are leaving.
    """
    slots: dict[str, list[str]] = {}
    for name in facts:
        slots.setdefault(host_of(name), []).append(name)
    offered: dict[str, str] = {}
    for lease, slot in sorted(leases.items(), key=lambda lease: lease[1]):
        offered.setdefault(host_of(slot), lease)
    for lease in leaving:
        offered.pop(host_of(leases.get(lease, "")), None)
    result = Claims({}, {}, set())
    for job in due[:MAX_DUE_JOBS]:
        hosts = expand(job.planned_on)
        reason = f"Slurm is about to start job {job.id} on its host"
        for host in hosts:
            names = slots.get(host, ())
            result.nodes.update(names)
            result.node_holds.update((name, reason) for name in names if facts[name].idle)
        if needed := [offered.pop(host) for host in hosts if host in offered]:
            result.needed_leases[job.id] = needed
    return result


def _sorted_by_membership(names: Collection[str], members: Collection[str]) -> list[str]:
    """Return ``names``, with those in ``members`` before the others."""
    return [name for name in names if name in members] + [
        name for name in names if name not in members
    ]


def _is_in_partition(facts: Mapping[str, NodeFacts], name: str, partitions: set[str]) -> bool:
    return name in facts and not partitions.isdisjoint(facts[name].partitions)
