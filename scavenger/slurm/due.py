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

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from scavenger.batch.rules import NodeFacts
from scavenger.slurm.hostlist import expand
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


class Claims(NamedTuple):
    """``kept``: idle node → why it is left alone. ``lacked``: job id → leases that it lacks to
    start.
    """

    kept: dict[str, str]
    lacked: dict[str, list[str]]


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
            or (name in before and any(_put_off(part, now) for part in parts))
        )
    ]


def _expected(job: SlurmJob, now: float) -> bool:
    begun = job.start is not None and job.start <= now + 1.0
    return begun and job.reason in WAITING_REASONS and bool(job.planned_on)


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
    their way out. Nodes that come free count before idle ones, planned ones before others. A job
    that could not start even with all leases, or on whose planned nodes there is none, waits for
    something else.
    """
    coming = {name for name, node in facts.items() if node.state.startswith("completing")}
    coming |= {leases[lease] for lease in leaving if lease in leases}
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
    found = Claims({}, {})
    for job in due[:AT_ONCE]:
        wanted, planned = set(job.partition.split(",")), expand(job.planned_on)
        first = set(planned)
        # A job that names a number of tasks only is listed with one node.
        needed = max(job.nodes, len(planned)) if job.nodes == 1 else job.nodes
        can = [name for name in (*coming, *_first(idle, first)) if _in(facts, name, wanted)]
        short = needed - len(can)
        if short > 0:
            give = [name for name in _first(offered, first) if _in(facts, name, wanted)]
            if len(give) < short or first.isdisjoint(give):
                continue
            found.lacked[job.id] = [offered.pop(name) for name in give[:short]]
        taken = set(can[:needed])
        why = (
            f"Slurm is about to start job {job.id}, which needs {needed} "
            f"node{'s' if needed > 1 else ''}"
        )
        found.kept.update(dict.fromkeys(taken & idle.keys(), why))
        coming -= taken
        for name in taken:
            idle.pop(name, None)
    return found


def _first(names: Collection[str], first: Collection[str]) -> list[str]:
    """``names``, those in ``first`` before the others."""
    return [name for name in names if name in first] + [name for name in names if name not in first]


def _in(facts: Mapping[str, NodeFacts], name: str, partitions: set[str]) -> bool:
    return name in facts and not partitions.isdisjoint(facts[name].partitions)
