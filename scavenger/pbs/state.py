"""Translates PBS states of vnodes, jobs and reservations into facts about nodes and leases.

A node is a host: all vnodes that name it in ``resources_available.host``. The tables of states
follow the PBS Professional Reference Guide ("Node States", "Job States"). Pure.
:mod:`scavenger.batch.rules` decides whether a node is a gap.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from scavenger.batch.commands import shorten
from scavenger.batch.lease_ledger import LeaseJob
from scavenger.batch.rules import NodeFacts
from scavenger.interface import Lease, LeaseState, kind_of
from scavenger.pbs.parse import (
    PbsJob,
    PbsReservation,
    RawNode,
    is_suspended,
    number_of,
    planned_uses,
    reservations_of,
    text_of,
)

IDLE_STATES = frozenset({"free", "resv-exclusive"})
RESERVED_STATES = frozenset({"resv-exclusive"})
BUSY_STATES = frozenset({"job-busy", "job-exclusive", "job-sharing", "job-suspended"})
UNAVAILABLE_STATES = {
    "busy": "its load is too high for jobs",
    "down": "it is down",
    "initializing": "it is being set up",
    "maintenance": "it is in maintenance (jobs were suspended by an administrator)",
    "offline": "it is offline",
    "offline-by-mom": "its MoM took it offline",
    "provisioning": "it is being provisioned",
    "resv-provisioning": "it is being provisioned",
    "sleep": "it is asleep",
    "stale": "its MoM no longer reports it",
    "state-unknown": "its state is not known",
    "unresolvable": "its name cannot be resolved",
    "wait-provisioning": "it waits to be provisioned",
}
"""Vnode state → description, for states that accept no new jobs. Jobs may still run there."""
DRAINED_STATES = frozenset({"offline", "maintenance"})
"""The states in UNAVAILABLE_STATES with which an administrator asks running jobs to leave."""
PENDING_STATES = frozenset({"Q", "T", "W", "H"})
ENDED_STATES = frozenset({"F", "M", "X"})
KILL_REASONS = {
    -27: "it used more memory than it asked for",
    -28: "it used more CPU time than it asked for",
    -29: "its time limit was reached",
}
"""Exit status of a job that MoM has killed (Reference Guide, "Job Exit Status Codes") →
description.
"""
RERUN_SUBSTATES = frozenset({60, 61, 62, 63})
"""The job is being requeued (openpbs, job.h, JOB_SUBSTATE_RERUN and the next three): it has
received its signal and still runs.
"""
_TERMINATED = re.compile(r"terminated by ([^\s@]+)")

HostVnodes = Sequence[tuple[str, RawNode]]
"""(name, vnode) of each vnode of one host that has CPUs."""


class PbsSnapshot(NamedTuple):
    """State of PBS at one poll: vnodes by host, pending jobs, our jobs by lease, reservations by
    name.
    """

    hosts: Mapping[str, HostVnodes]
    """Host → its vnodes."""
    pending: Sequence[PbsJob]
    """Pending jobs of others."""
    own: Mapping[str, PbsJob]
    """Lease id → its job."""
    reservations: Mapping[str, PbsReservation]
    """Id → reservation."""
    suspended: Sequence[PbsJob] = ()
    """Suspended jobs of others."""


def by_host(nodes: Mapping[str, RawNode]) -> dict[str, list[tuple[str, RawNode]]]:
    """Return host → its vnodes with CPUs. The natural vnode has none if other vnodes of the host
    have them.
    """
    hosts: dict[str, list[tuple[str, RawNode]]] = {}
    for name, node in nodes.items():
        resources = node.resources_available
        cpus = resources.get("ncpus")
        if cpus is not None and number_of(cpus) <= 0:
            continue
        hosts.setdefault(host_name(name, node), []).append((name, node))
    return hosts


def without_cpus(nodes: Mapping[str, RawNode]) -> dict[str, list[tuple[str, RawNode]]]:
    """Return host → its vnodes without CPUs, which can have GPUs or memory of the host."""
    hosts: dict[str, list[tuple[str, RawNode]]] = {}
    for name, node in nodes.items():
        cpus = node.resources_available.get("ncpus")
        if cpus is not None and number_of(cpus) <= 0:
            hosts.setdefault(host_name(name, node), []).append((name, node))
    return hosts


def host_name(vnode: str, node: RawNode) -> str:
    """Return the name of a vnode's host. ``vnode``: name of the vnode."""
    host = node.resources_available.get("host")
    # PBS prints a name such as 1e3 as the number that it looks like.
    return ("" if isinstance(host, float) else text_of(host)) or vnode.partition("[")[0]


def in_slot(job: PbsJob, node: str) -> PbsJob:
    """Return one of our jobs with the name of its slot in place of its host.

    Args:
        job: the job.
        node: node or slot of its lease; empty if it is not known.
    """
    return job._replace(host=node) if kind_of(node) else job


def terminated_by(job: PbsJob) -> str:
    """Return who ended the job, from its comment: ``Scheduler`` for a preemption, a user's name for
    qdel; empty if none of them did. PBS sets the comment while the job still runs in its grace
    time.
    """
    match = _TERMINATED.search(job.comment)
    return match[1] if match else ""


def is_preempted(job: PbsJob) -> bool:
    """Return whether the scheduler is ending the job, or has suspended or requeued it."""
    return (
        terminated_by(job) == "Scheduler"
        or job.substate in RERUN_SUBSTATES
        or is_suspended(job.state, job.substate)
        or was_requeued(job)
    )


def was_requeued(job: PbsJob) -> bool:
    """Return whether PBS preempted the job by requeuing it: it has run and is pending, or runs
    again.
    """
    return job.runs > (0 if job.state in PENDING_STATES else 1)


def loss_reason(job: PbsJob) -> str:
    """Return why a lease has ended although its job still exists; empty if the lease has not
    ended.
    """
    if is_suspended(job.state, job.substate):
        return "the main scheduler suspended it"
    if was_requeued(job):
        return "the main scheduler requeued it"
    return "it is held" if job.state == "H" else ""


def lease_of(lease_id: str, job: PbsJob, now: float, grace_s: float) -> Lease:
    """Return the lease that a job represents.

    Args:
        lease_id: id of the lease.
        job: its job.
        now: epoch seconds.
        grace_s: maximum time between the signal and the end of a job, seconds.
    """
    if job.state in ENDED_STATES:
        return Lease(lease_id, job.id, LeaseState.ENDED, job.host, end_reason(job))
    if job.state in PENDING_STATES:
        return Lease(lease_id, job.id, LeaseState.PENDING, job.host, job.comment)
    deleted_by = terminated_by(job)
    if job.state == "E" or deleted_by or job.substate in RERUN_SUBSTATES:
        reason = (
            "preempted"
            if is_preempted(job)
            else f"it was deleted by {deleted_by}"
            if deleted_by
            else "it is ending"
        )
        return Lease(lease_id, job.id, LeaseState.RUNNING, job.host, reason, now + grace_s)
    return Lease(lease_id, job.id, LeaseState.RUNNING, job.host, ends_by=job.ends_by)


def ledger_entry(lease_id: str, job: PbsJob, now: float, grace_s: float) -> LeaseJob:
    """Return the ledger's record of one of our jobs.

    Args:
        lease_id: id of the lease.
        job: its job.
        now: epoch seconds.
        grace_s: as in :func:`lease_of`.
    """
    return LeaseJob(
        lease_of(lease_id, job, now, grace_s),
        job.user,
        job.host,
        job.submitted,
        loss_reason(job),
        job.state == "E",
        is_suspended(job.state, job.substate),
    )


def end_reason(job: PbsJob) -> str:
    """Return a sentence that says why a job has ended."""
    if deleted_by := terminated_by(job):
        return "preempted" if deleted_by == "Scheduler" else f"it was deleted by {deleted_by}"
    if job.exit is None:
        return "it ended"
    if job.exit in KILL_REASONS:
        return KILL_REASONS[job.exit]
    if job.exit < 0:
        return f"PBS could not run it (exit status {job.exit}: {job.comment or 'no reason given'})"
    return (
        "its command ended" if job.exit == 0 else f"its command failed with exit status {job.exit}"
    )


def node_facts(
    reading: PbsSnapshot,
    queues_of: Callable[[RawNode], Sequence[str]],
    idle_since: Mapping[str, float],
    now: float,
    with_features: bool = True,
) -> dict[str, NodeFacts]:
    """Return host → its facts.

    Args:
        reading: the state of PBS.
        queues_of: returns the queues whose jobs can run on a vnode.
        idle_since: host → time since which it is idle, from the previous poll.
        now: epoch seconds.
        with_features: whether the rules need the hosts' features.
    """
    uses = planned_uses(reading.pending)
    # PBS lists a suspended job on none of its vnodes. It keeps its memory there, and is to go on
    # with them when it is resumed.
    suspended = {
        vnode: f"job {job.id} is suspended on it"
        for job in reading.suspended
        for vnode in job.vnodes
    }
    lease_on_host = {
        job.host: lease
        for lease, job in reading.own.items()
        if job.host and job.state not in ENDED_STATES
    }
    interned: dict[tuple[str, ...], tuple[str, ...]] = {}
    facts = {}
    for host, vnodes in reading.hosts.items():
        state, idle, unavailable, in_reservation, drained = _host_state(vnodes)
        reserved, reserved_from = _reserved(vnodes, reading.reservations, in_reservation, now)
        planned = [uses[name] for name, _ in vnodes if name in uses] if uses else ()
        first = vnodes[0][1]
        features: tuple[str, ...] = ()
        if with_features:
            features = features_of(first)
            features = interned.setdefault(features, features)
        facts[host] = NodeFacts(
            name=host,
            state=state,
            idle=idle,
            trouble=unavailable
            or next((suspended[name] for name, _ in vnodes if name in suspended), ""),
            reserved=reserved,
            reserved_from=reserved_from,
            planned=bool(planned) and idle,
            planned_at=min(planned) if planned and idle else None,
            partitions=queues_of(first),
            features=features,
            idle_since=idle_since.get(host, now) if idle else None,
            lease=lease_on_host.get(host, ""),
            drained=drained,
        )
    return facts


def features_of(node: RawNode) -> tuple[str, ...]:
    """Return the features of a vnode for the rules: ``name=value`` of each resource that is a
    string, and the names of the booleans that are true.
    """
    features = []
    for name, value in node.resources_available.items():
        if value is True or value == "True":
            features.append(name)
        elif isinstance(value, str) and value != "False":
            features += [f"{name}={part.strip()}" for part in value.split(",")]
    return tuple(features)


def _host_state(vnodes: HostVnodes) -> tuple[str, bool, str, bool, str]:
    """Return (text to show, whether no job runs there, why it accepts no jobs, whether it is
    reserved, why running jobs must leave) of a host.
    """
    if len(vnodes) == 1 and vnodes[0][1].state == "free" and not vnodes[0][1].jobs:  # usual case
        return "free", True, "", False, ""
    shown, idle, unavailable, reserved, drained = [], True, "", False, ""
    for _, node in vnodes:
        text = text_of(node.state)
        words = [word.strip().lower() for word in text.split(",")]
        if node.jobs or not BUSY_STATES.isdisjoint(words):
            idle = False
        if node.jobs and "free" in words:
            text = "partly used"
        reserved = reserved or not RESERVED_STATES.isdisjoint(words)
        for word in words:
            if word in IDLE_STATES or word in BUSY_STATES:
                continue
            comment = shorten(text_of(node.comment))
            sentence = UNAVAILABLE_STATES.get(word, f"MalleTrain does not know its state {word!r}")
            sentence += f" ({comment})" if comment else ""
            unavailable = unavailable or sentence
            drained = drained or (sentence if word in DRAINED_STATES else "")
        if text not in shown:
            shown.append(text)
    return "; ".join(shown), idle, unavailable, reserved, drained


def _reserved(
    vnodes: HostVnodes, reservations: Mapping[str, PbsReservation], in_reservation: bool, now: float
) -> tuple[str, float | None]:
    """Return the host's current reservation as text, and the start time of the next one."""
    active, next_start = "", None
    for _, node in vnodes:
        for name in reservations_of(node):
            reservation = reservations.get(name)
            if reservation is None:
                active = active or (f"reservation {name} has it" if in_reservation else "")
            elif reservation.start <= now < reservation.end:
                noun = "maintenance reservation" if name.startswith("M") else "reservation"
                active = active or f"{noun} {name} has it"
            elif reservation.start > now and (next_start is None or reservation.start < next_start):
                next_start = reservation.start
    if in_reservation and not active:
        active = "it is in a reservation"
    return active, next_start
