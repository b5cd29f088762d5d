"""What Slurm's words mean: node states, job states and reservations turned into facts about nodes
and leases.

The states stand in literal tables after the manual pages they come from. Pure; whether a node is a
gap is :mod:`scavenger.batch.rules`' decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scavenger.batch.groups import is_unknown
from scavenger.batch.lease_ledger import LeaseJob
from scavenger.batch.rules import NodeFacts
from scavenger.hostlist import HostlistError, expand
from scavenger.interface import Lease, LeaseState, SchedulerError
from scavenger.slurm.parse import NodeTable, SlurmJob, SlurmReservation, planned_uses

IDLE_STATES = frozenset({"idle", "planned", "reserved", "maint"})
RESERVED_STATES = {
    "reserved": "it is in a reservation",
    "maint": "it is in a maintenance reservation",
}
TROUBLE_STATES = frozenset(
    {
        "blocked",
        "down",
        "drained",
        "draining",
        "drng",
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
"""States (sinfo(1), "NODE STATE CODES") of nodes that take no jobs, whether or not somebody still
runs on them.
"""
DRAINED_STATES = frozenset(
    {"drained", "draining", "drng", "reboot_issued", "reboot_requested", "power_down"}
)
"""Those among them by which an administrator wants whoever runs there to go."""
TROUBLE_MARKS = {
    "*": "it does not respond",
    "~": "it is powered down",
    "#": "it is powering up",
    "!": "it is about to be powered down",
    "%": "it is powering down",
    "@": "it is about to be rebooted",
    "^": "it is rebooting",
    "$": "it is in a maintenance reservation",
}
"""Marks behind the state of a node, from the same place."""
DRAINED_MARKS = frozenset("@!")
"""As DRAINED_STATES: to be rebooted, or powered down, once nobody runs there."""
PLANNED_MARK = "-"

PENDING_STATES = frozenset(
    {
        "PENDING",
        "CONFIGURING",
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
"""States in which a job has ended (squeue(1), "JOB STATE CODES"), in words. A lease that leaves by
itself within its grace time ends as COMPLETED or FAILED and not as PREEMPTED, so nothing is
concluded from the difference.
"""


def lease_of(lease_id: str, job: SlurmJob, now: float, grace_s: float) -> Lease:
    """The lease that a job is. Slurm brings the end of a job forward when it preempts it: within
    ``grace_s`` of its end it is leaving.
    """
    called = job.part.id if job.part else job.id
    if job.state in ENDED_STATES:
        why, began = ENDED_STATES[job.state], job.start
        return Lease(
            lease_id, called, LeaseState.ENDED, job.node_list, why, started=began, ended=job.end
        )
    if job.state in PENDING_STATES:
        return Lease(lease_id, called, LeaseState.PENDING, job.node_list, job.reason)
    leaving = job.state == "COMPLETING" or (job.end is not None and job.end - now <= grace_s + 1.0)
    gone_at = (now if job.end is None else job.end) if leaving else None
    return Lease(
        lease_id,
        called,
        LeaseState.RUNNING,
        job.node_list,
        "it is ending" if leaving else "",
        gone_at,
        job.start,
        job.end if job.state == "COMPLETING" else None,  # it has ended, and its node is cleaned up
    )


def lease_job(lease_id: str, job: SlurmJob, now: float, grace_s: float) -> LeaseJob:
    """A job of ours as the ledger has it. One that is suspended is lost: it keeps its memory and
    may do nothing for ever.
    """
    lost = "the main scheduler suspended it" if job.state == "SUSPENDED" else ""
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


def describe(
    table: NodeTable,
    pending: Sequence[SlurmJob],
    reservations: Sequence[SlurmReservation],
    own: Mapping[str, SlurmJob],
    idle_since: Mapping[str, float],
    now: float,
) -> dict[str, NodeFacts]:
    """Everything known of every node. ``idle_since``: of the nodes that were idle at the poll
    before. Raises SchedulerError for lists of nodes that cannot be read.
    """
    uses = planned_uses(pending)
    active, coming = _reserved(reservations, now)
    holders = _holders(own)
    facts = {}
    for name, group in table.nodes.items():
        idle = group.base in IDLE_STATES
        facts[name] = NodeFacts(
            name=name,
            state=group.state,
            idle=idle,
            trouble=_trouble(group.base, group.marks, group.reason),
            reserved=active.get(name) or RESERVED_STATES.get(group.base, ""),
            reserved_from=coming.get(name),
            planned=group.base == "planned" or PLANNED_MARK in group.marks,
            planned_at=uses.get(name) if idle else None,
            partitions=table.partitions[name],
            features=group.features,
            idle_since=idle_since.get(name, now) if idle else None,
            lease=holders.get(name, ""),
            drained=_drained(group.base, group.marks, group.reason),
        )
    return facts


def _trouble(base: str, marks: str, reason: str) -> str:
    """Why a node in this state takes no jobs; empty when it does."""
    because = f" ({reason})" if reason else ""
    if base in TROUBLE_STATES:
        return f"it is {base}{because}"
    return (
        next(
            (f"{sentence}{because}" for mark, sentence in TROUBLE_MARKS.items() if mark in marks),
            "",
        )
        if marks
        else ""
    )


def _drained(base: str, marks: str, reason: str) -> str:
    """Why who runs on a node in this state has to leave; empty when they need not."""
    drained = base in DRAINED_STATES or not DRAINED_MARKS.isdisjoint(marks)
    return _trouble(base, marks, reason) if drained else ""


def _reserved(
    reservations: Sequence[SlurmReservation], now: float
) -> tuple[dict[str, str], dict[str, float]]:
    """Node → the reservation that has it now, in words; node → when the next one begins."""
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
        what = "maintenance reservation" if reservation.maintenance else "reservation"
        for name in names:
            if reservation.start <= now:
                active[name] = f"{what} {reservation.name} has it"
            elif reservation.start < coming.get(name, float("inf")):
                coming[name] = reservation.start
    return active, coming


def _holders(own: Mapping[str, SlurmJob]) -> dict[str, str]:
    """Node → the lease that runs on it or waits for it."""
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
