"""Decides which leases have to leave because of the site's plans for their nodes. Pure.

The main scheduler preempts leases to take a node back for a job. It does not preempt for a
reservation that begins, or for a node that an administrator drains: it waits until the lease ends.
It does not know the hours of ``[gaps]`` either. So leases are asked to leave as in a preemption.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from scavenger.batch.rules import NodeFacts, hours_sentence, span
from scavenger.interface import Lease, LeaseState


def must_leave(
    leases: Iterable[Lease],
    facts: Mapping[str, NodeFacts],
    notice_s: float,
    now: float,
    hours_remaining_s: float | None = None,
    grace_s: float = 0.0,
) -> dict[str, str]:
    """Return lease id → why it has to leave now.

    Args:
        leases: all leases; only running ones are asked.
        facts: node → its facts.
        notice_s: time before a reservation begins at which its node must be asked for, seconds.
        now: epoch seconds.
        hours_remaining_s: time for which leases are still allowed, seconds; None: no end. The time
            limit of a lease that was taken under these hours ends with them. That of a lease from
            before they were reloaded does not.
        grace_s: maximum time to leave after the request, seconds.
    """
    reasons = {}
    for lease in leases:
        node = facts.get(lease.node)
        if lease.state is not LeaseState.RUNNING or node is None:
            continue
        if node.drained or node.reserved:
            reasons[lease.id] = f"its node is wanted: {node.drained or node.reserved}"
        elif node.reserved_from is not None and node.reserved_from - now <= notice_s:
            begins_in = span(node.reserved_from - now)
            reasons[lease.id] = f"a reservation of its node begins in {begins_in}"
        elif hours_remaining_s is not None and hours_remaining_s <= grace_s:
            reasons[lease.id] = hours_sentence(hours_remaining_s)
    return reasons
