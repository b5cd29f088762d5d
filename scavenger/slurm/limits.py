"""Jobs that wait because a limit of their association or QOS is reached, against which leases
count.

Slurm preempts for nodes and never for a limit: a job that waits with such a reason waits until
somebody of its account ends. Where a site says so (``leave_at_limits``), leases that count against
the same limit leave for it, as many as it has nodes, and none is asked for meanwhile. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scavenger.slurm.job import SlurmLeaseOptions
from scavenger.slurm.parse import SlurmJob
from scavenger.slurm.state import ENDED_STATES, PENDING_STATES

NEVER = re.compile(r"\w*(?:PerJob|(?<!Run)Minutes|Wall)\w*")
"""Limits that the end of a lease does not help: of a single job, and of what has been used up."""
OF_USER = re.compile(r"AssocMax\w*|QOSMax\w*PerUser\w*|QOSMax\w*PU\w*|Max\w+PerUser")
OF_ACCOUNT = re.compile(r"AssocGrp\w*|QOSMax\w*PerAccount\w*|Max\w+PerAccount|Association\w*Limit")
OF_QOS = re.compile(r"QOSGrp\w*")
"""Reasons (squeue(1), "JOB REASON CODES") by whose jobs count against the limit."""


class AtLimit(NamedTuple):
    """What jobs at a limit ask of leases."""

    hold: str
    """Why no lease may be asked for; empty when they may."""
    lacked: dict[str, list[str]]
    """Job id → leases that should leave for it."""


def at_limit(
    pending: Sequence[SlurmJob],
    own: Mapping[str, SlurmJob],
    options: SlurmLeaseOptions,
    user: str,
) -> AtLimit:
    """What the waiting jobs of others ask of the leases.

    Args:
        pending: waiting jobs.
        own: lease id → its job.
        options: of the leases.
        user: who has the leases; empty where several users have some.
    """
    running = {
        lease: job
        for lease, job in sorted(own.items())
        if job.state not in ENDED_STATES and job.state not in PENDING_STATES
    }
    found = AtLimit("", {})
    for job in pending:
        if not found.hold and _counts(job, user, options.account, options):
            why = f"job {job.id} waits for {job.reason}, against which leases count"
            found = found._replace(hold=why)
        leave = [
            lease for lease, one in running.items() if _counts(job, one.user, one.account, options)
        ][: job.nodes]
        for lease in leave:
            del running[lease]
        if leave:
            found.lacked[job.id] = leave
    return found


def _counts(job: SlurmJob, user: str, account: str, options: SlurmLeaseOptions) -> bool:
    """Whether a lease of this user and account (empty: not known) counts against the limit at which
    ``job`` waits. One with a QOS of its own counts against no other QOS.
    """
    reason = job.reason
    if NEVER.fullmatch(reason):
        return False
    if reason.startswith("QOS") and options.qos:
        return False
    if OF_USER.fullmatch(reason):
        return job.user == user and account in ("", job.account)
    if OF_ACCOUNT.fullmatch(reason) or OF_QOS.fullmatch(reason):
        return account == job.account if account else job.user == user
    return False
