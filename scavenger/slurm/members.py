"""Splits jobs of Slurm that leases share, arrays and blocks, into one job for each lease.

Slurm chooses the nodes of both among those for which leases were requested, so the node identifies
the lease. Pending tasks belong to all leases whose nodes have no task yet. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from scavenger.batch.groups import PartOf, leases_in, unknown
from scavenger.hostlist import expand
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
            for node in expand(job.node_list):
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
    here = job.node_list and node
    return job._replace(name=name, node_list=here, requested_nodes=node, part=part, nodes=1)
