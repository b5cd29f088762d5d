"""Which leases to give up of our own accord, because Slurm lets a job wait that it could start by preempting them.

Slurm preempts for a job once and then not again for up to 30 s (seen with 22.05). A job for which too few nodes came free, because another
job took some of them, waits that long although leases are there to be taken. Slurm says so itself: the job waits for resources and its
expected start is now, or was. This module finds such jobs and the leases that they lack; they are then asked to leave as a preemption
would ask them. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from scavenger.hostlist import expand
from scavenger.rules import NodeFacts
from scavenger.slurm_parse import Job
from scavenger.slurm_site import SlurmSite

WAITING_REASONS = frozenset({"Resources", "Priority", "None"})
"""Reasons (squeue(1), "JOB REASON CODES") of a job that waits for nodes and for nothing else."""
PATIENCE_S = 2.0
"""A job may be found lacking nodes for a moment while Slurm is just starting it."""


def due_jobs(pending: Sequence[Job], site: SlurmSite, lease_partition: str, now: float) -> list[Job]:
    """Jobs of partitions above that of the leases which could have started by now, as Slurm itself expects."""
    own = site.partitions.get(lease_partition)
    tier = own.tier if own is not None else 0
    return [
        job
        for job in pending
        if job.start is not None
        and job.start <= now + 1.0
        and job.reason in WAITING_REASONS
        and job.planned_on
        and any(p in site.partitions and site.partitions[p].tier > tier for p in job.partition.split(","))
    ]


def lacking(
    due: Sequence[Job], facts: Mapping[str, NodeFacts], leases: Mapping[str, str], leaving: Collection[str]
) -> dict[str, list[str]]:
    """Job id → leases that it lacks to start, those on the nodes it is planned on first.

    ``leases``: lease id → node, of the running ones; ``leaving``: those among them that are on their way out. A job that could not start
    even with all of them is passed over.
    """
    open_nodes = {name for name, node in facts.items() if node.idle and not node.trouble and not node.reserved}
    open_nodes |= {name for name, node in facts.items() if node.state.startswith("completing")}
    open_nodes |= {leases[lease] for lease in leaving if lease in leases}
    offered = {node: lease for lease, node in leases.items() if lease not in leaving}
    found: dict[str, list[str]] = {}
    for job in due:
        wanted = set(job.partition.split(","))
        mine = {name for name in open_nodes if name in facts and not wanted.isdisjoint(facts[name].partitions)}
        short = job.nodes - len(mine)
        if short <= 0:
            open_nodes -= set(sorted(mine)[: job.nodes])
            continue
        planned = set(expand(job.planned_on))
        can = [name for name in offered if name in facts and not wanted.isdisjoint(facts[name].partitions)]
        can.sort(key=lambda name: name not in planned)
        if len(can) < short:
            continue
        open_nodes -= mine
        found[job.id] = [offered.pop(name) for name in can[:short]]
    return found
