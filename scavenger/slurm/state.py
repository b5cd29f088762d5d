"""Translates Slurm's states of nodes, jobs and reservations into facts about nodes and leases.

The tables of states follow the manual pages that they name. Pure. :mod:`scavenger.batch.rules`
decides whether a node is a gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scavenger.batch.groups import is_unknown
from scavenger.batch.lease_ledger import LeaseJob
from scavenger.batch.rules import NodeFacts
from scavenger.hostlist import HostlistError, expand
from scavenger.interface import Lease, LeaseState, SchedulerError
from scavenger.slurm.parse import (
    NodeTable,
    SlurmJob,
    SlurmJobTable,
    SlurmReservation,
    planned_uses,
)

IDLE_STATES = frozenset({"idle", "planned", "reserved", "maint"})
RESERVED_STATES = {
    "reserved": "it is in a reservation",
    "maint": "it is in a maintenance reservation",
}
UNAVAILABLE_STATES = frozenset(
    {
        "blocked",
        "down",
        "drained",
        "draining",
        "drng",
        "external",
        "fail",
        "failing",
        "failg",
        "future",
        "inval",
        "no_respond",
        "npc",
        "perfctrs",
        "power_down",
        "power_up",
        "powered_down",
        "powering_down",
        "powering_up",
        "reboot",
        "reboot_issued",
        "reboot_requested",
        "unknown",
    }
)
"""States (sinfo(1), "NODE STATE CODES") of nodes that accept no new jobs. Jobs may still run
there.
"""
DRAINED_STATES = frozenset(
    {"drained", "draining", "drng", "reboot_issued", "reboot_requested", "power_down"}
)
"""The states among UNAVAILABLE_STATES with which an administrator asks running jobs to leave."""
UNAVAILABLE_MARKS = {
    "*": "it does not respond",
    "~": "it is powered down",
    "#": "it is powering up",
    "!": "it is about to be powered down",
    "%": "it is powering down",
    "@": "it is about to be rebooted",
    "^": "it is rebooting",
    "$": "it is in a maintenance reservation",
}
"""Marks after the state of a node, from the same page."""
DRAINED_MARKS = frozenset("@!")
"""The same for marks: the node is to be rebooted or powered down when no job runs there."""
PLANNED_MARK = "-"

PENDING_STATES = frozenset(
    {
        "PENDING",
        "CONFIGURING",
        "EXPEDITING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
    }
)
ENDED_STATES = {
    "BOOT_FAIL": "the node could not be booted",
    "CANCELLED": "it was cancelled",
    "COMPLETED": "its command ended",
    "DEADLINE": "it did not start in time",
    "FAILED": "its command failed",
    "LAUNCH_FAILED": "the node could not start it",
    "NODE_FAIL": "the node failed",
    "OUT_OF_MEMORY": "it ran out of memory",
    "PREEMPTED": "preempted",
    "RECONFIG_FAIL": "the node could not be set up",
    "REVOKED": "another cluster took it",
    "TIMEOUT": "its time limit was reached",
}
"""State in which a job has ended (squeue(1), "JOB STATE CODES") → description. A lease that leaves
within its grace time ends as COMPLETED or FAILED, not as PREEMPTED, so nothing is concluded from
the difference.
"""


def _ends_within(job: SlurmJob, now: float, grace_s: float) -> bool:
    """Return whether the end of a job is within the grace time, so that it has been preempted."""
    return job.end is not None and job.end - now <= grace_s + 1.0


def lease_of(lease_id: str, job: SlurmJob, now: float, grace_s: float) -> Lease:
    """Return the lease that a job represents. When Slurm preempts a job, it moves the job's end
    forward: a lease within ``grace_s`` of its end is leaving.

    Args:
        lease_id: id of the lease.
        job: its job.
        now: epoch seconds.
        grace_s: grace time of a preempted job, seconds.
    """
    called = job.part.id if job.part else job.id
    if job.state in ENDED_STATES:
        reason, began = ENDED_STATES[job.state], job.start
        return Lease(
            lease_id, called, LeaseState.ENDED, job.node_list, reason, started=began, ended=job.end
        )
    if job.state in PENDING_STATES:
        return Lease(lease_id, called, LeaseState.PENDING, job.node_list, job.reason)
    leaving = job.state == "COMPLETING" or _ends_within(job, now, grace_s)
    gone_at = (now if job.end is None else job.end) if leaving else None
    return Lease(
        lease_id,
        called,
        LeaseState.RUNNING,
        job.node_list,
        "it is ending" if leaving else "",
        gone_at,
        job.start,
        job.end if job.state == "COMPLETING" else None,  # ended; Slurm cleans up the node
        None if leaving else job.end,
    )


def ledger_entry(lease_id: str, job: SlurmJob, now: float, grace_s: float) -> LeaseJob:
    """Return the ledger's record of one of our jobs. A suspended job counts as lost: it keeps its
    memory and may never run again. So does one that is preempted while its node is set up, for
    example in the prolog: when it starts, Slurm moves its end back and does not preempt it again.

    Args:
        lease_id: id of the lease.
        job: its job.
        now: epoch seconds.
        grace_s: as in :func:`lease_of`.
    """
    lost = "the main scheduler suspended it" if job.state == "SUSPENDED" else ""
    if job.state == "CONFIGURING" and _ends_within(job, now, grace_s):
        lost = "preempted while its node was set up"
    if job.part and is_unknown(lease_id):
        lost = "nobody asked for it"
    return LeaseJob(
        lease_of(lease_id, job, now, grace_s),
        job.user,
        job.requested_nodes,
        job.submitted,
        lost,
        job.state == "COMPLETING",
        handle=job.id if job.part and not job.part.removable else "",
        part=job.part,
    )


def node_facts(
    table: NodeTable,
    jobs: SlurmJobTable,
    reservations: Sequence[SlurmReservation],
    own: Mapping[str, SlurmJob],
    idle_since: Mapping[str, float],
    now: float,
) -> dict[str, NodeFacts]:
    """Return node → its facts.

    Args:
        table: nodes.
        jobs: jobs.
        reservations: reservations.
        own: lease id → its job.
        idle_since: node → time since which it is idle, from the previous poll.
        now: epoch seconds.

    Raises:
        SchedulerError: a node list cannot be parsed.
    """
    uses = planned_uses(jobs.pending)
    suspended = _suspended_on(jobs.suspended)
    active, coming = _reserved(reservations, now)
    holders = _lease_by_node(own)
    facts = {}
    for name, group in table.nodes.items():
        idle = group.base in IDLE_STATES
        facts[name] = NodeFacts(
            name=name,
            state=group.state,
            idle=idle,
            trouble=_unavailable_reason(group.base, group.marks, group.reason)
            or suspended.get(name, ""),
            reserved=active.get(name) or RESERVED_STATES.get(group.base, ""),
            reserved_from=coming.get(name),
            planned=group.base == "planned" or PLANNED_MARK in group.marks,
            planned_at=uses.get(name) if idle else None,
            partitions=table.partitions[name],
            features=group.features,
            idle_since=idle_since.get(name, now) if idle else None,
            lease=holders.get(name, ""),
            drained=_drain_reason(group.base, group.marks, group.reason),
        )
    return facts


def _suspended_on(jobs: Sequence[SlurmJob]) -> dict[str, str]:
    """Return node → text about the suspended job on it, which keeps its memory there and is to go
    on with the node when it is resumed.
    """
    reasons: dict[str, str] = {}
    for job in jobs:
        try:
            reasons.update(dict.fromkeys(expand(job.node_list), f"job {job.id} is suspended on it"))
        except HostlistError as error:
            raise SchedulerError(f"The answer of squeue cannot be understood: {error}") from None
    return reasons


def _unavailable_reason(base: str, marks: str, reason: str) -> str:
    """Return why a node in this state accepts no jobs; empty if it does."""
    because = f" ({reason})" if reason else ""
    if base in UNAVAILABLE_STATES:
        return f"it is {base}{because}"
    return (
        next(
            (
                f"{sentence}{because}"
                for mark, sentence in UNAVAILABLE_MARKS.items()
                if mark in marks
            ),
            "",
        )
        if marks
        else ""
    )


def _drain_reason(base: str, marks: str, reason: str) -> str:
    """Return why running jobs have to leave a node in this state; empty if they need not."""
    drained = base in DRAINED_STATES or not DRAINED_MARKS.isdisjoint(marks)
    return _unavailable_reason(base, marks, reason) if drained else ""


def _reserved(
    reservations: Sequence[SlurmReservation], now: float
) -> tuple[dict[str, str], dict[str, float]]:
    """Return (node → text about its current reservation, node → start time of the next one)."""
    active: dict[str, str] = {}
    coming: dict[str, float] = {}
    for reservation in reservations:
        if reservation.end <= now:
            continue
        try:
            names = expand(reservation.nodes)
        except HostlistError as error:
            raise SchedulerError(
                f"The answer of scontrol show reservation cannot be understood: {error}"
            ) from None
        kind = "maintenance reservation" if reservation.maintenance else "reservation"
        for name in names:
            if reservation.start <= now:
                active[name] = f"{kind} {reservation.name} has it"
            elif reservation.start < coming.get(name, float("inf")):
                coming[name] = reservation.start
    return active, coming


def _lease_by_node(own: Mapping[str, SlurmJob]) -> dict[str, str]:
    """Return node → the lease that runs on it or waits for it."""
    holders: dict[str, str] = {}
    for lease_id, job in own.items():
        if job.state not in ENDED_STATES and (nodes := job.node_list or job.requested_nodes):
            try:
                holders.update(dict.fromkeys(expand(nodes), lease_id))
            except HostlistError as error:
                raise SchedulerError(
                    f"The answer of squeue cannot be understood: {error}"
                ) from None
    return holders
