"""Which leases have to leave because of what the site plans for their node. Pure.

Preemption is the main scheduler's way to take a node back for a job. For a reservation that begins,
or a node that an administrator drains, it preempts nothing: it waits, for as long as a lease may
last. Nor does it know the hours of ``[gaps]``. So leases are asked to leave as at a preemption.
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
    """Lease id → why it has to leave now.

    Args:
        leases: those that there are; only running ones are asked.
        facts: what is known of each node.
        notice_s: how long before a reservation begins its node must be asked for, seconds.
        now: epoch seconds.
        hours_remaining_s: for how long leases are allowed still, seconds; None: there is no end. A
            lease that was taken under these hours ends with them by its time limit; one of before
            they were reloaded does not.
        grace_s: how long a lease that is asked to leave may take, seconds.
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
