"""Pauses lease requests while Slurm preempts leases for a job that it does not show yet.

A main job can need more nodes than those of the leases that it preempts. It counts on idle nodes
without marking them as planned (observed with Slurm 22.05). Within a second or two Slurm shows the
job (:mod:`scavenger.slurm.due`). From then on only the nodes that it needs are left alone. Until
then no lease is requested, and pending ones are withdrawn. Each preempted lease counts separately,
because several main jobs can preempt at once, and Slurm can show one of them first.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from scavenger.batch.rules import NodeFacts
from scavenger.slurm.parse import SlurmJob
from scavenger.slurm.state import ENDED_STATES, PENDING_STATES


class Hold:
    """Watches our jobs from poll to poll for ends before their time limit."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}
        """Lease id → time at which its job would end by its time limit."""
        self._alive: set[str] = set()
        self._open: dict[str, tuple[float, str]] = {}
        """Preempted lease whose node is not in use by others yet → (time of the observation,
        node).
        """
        self._seen: set[str] = set()

    def look(
        self,
        own: Mapping[str, SlurmJob],
        given_up: Container[str],
        facts: Mapping[str, NodeFacts],
        due_nodes: Container[str],
        hold_s: float,
        now: float,
    ) -> str:
        """Update from a poll.

        Args:
            own: lease id → its job.
            given_up: leases that the daemon ends.
            facts: node → its facts.
            due_nodes: nodes on which the jobs count that Slurm shows as about to start.
            hold_s: pause in requests after a preempted lease, seconds.
            now: epoch seconds.

        Returns:
            Why no lease may be requested now; empty if leases may be requested.
        """
        for lease_id, job in own.items():
            if lease_id in given_up or job.state in PENDING_STATES or job.end is None:
                continue
            early = job.end < self._ends.setdefault(lease_id, job.end) - 1.0
            if (
                early
                and (job.state not in ENDED_STATES or lease_id in self._alive)
                and lease_id not in self._seen
            ):
                self._seen.add(lease_id)
                self._open[lease_id] = (now, job.node_list)
        self._seen &= own.keys()
        self._ends = {lease_id: end for lease_id, end in self._ends.items() if lease_id in own}
        self._alive = {lease_id for lease_id, job in own.items() if job.state not in ENDED_STATES}
        self._open = {
            lease_id: (since, node)
            for lease_id, (since, node) in self._open.items()
            if 0 <= now - since < hold_s
            and node not in due_nodes
            and (lease_id in self._alive or node not in facts or not _in_use(facts[node]))
        }
        if not self._open:
            return ""
        since = now - max(since for since, _ in self._open.values())
        return f"the main scheduler took leases back {since:.0f} s ago and may need more nodes"


def _in_use(node: NodeFacts) -> bool:
    return not node.idle and not node.state.startswith("completing")
