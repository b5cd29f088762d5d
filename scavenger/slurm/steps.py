"""Detects the nodes of a block whose agent has ended while the job continues on other nodes. Pure.

A job with one node ends with its agent. In a block each agent is a separate step, whose end does
not end the job. This module decides when Slurm is asked for steps, and whose step has ended.
"""

from __future__ import annotations

from collections.abc import Mapping

from scavenger.slurm.members import RUNNING_STATES
from scavenger.slurm.parse import SlurmJob

QUERY_INTERVAL_S = 30.0
"""Interval at which Slurm is asked for the running steps while there are blocks, seconds."""
ENDED = "its agent has ended, and other leases of its job go on"


class StepWatch:
    """Watches the steps of blocks. Ignores a lease whose step was never seen."""

    def __init__(self) -> None:
        self._asked_at = 0.0
        self._seen: set[str] = set()
        """Leases whose step was seen running."""
        self._missed: set[str] = set()
        """Leases whose step was missing in the last answer."""
        self._ended: set[str] = set()

    def due(self, own: Mapping[str, SlurmJob], now: float) -> set[str]:
        """Return the jobs whose steps should be requested now.

        Args:
            own: lease id → its job.
            now: epoch seconds.
        """
        parts = {lease: part for lease, job in own.items() if (part := _in_block(job)) is not None}
        self._seen &= parts.keys()
        self._missed &= parts.keys()
        self._ended &= parts.keys()
        if not self._missed and 0 <= now - self._asked_at < QUERY_INTERVAL_S:
            return set()
        self._asked_at = now
        return {job for lease, (job, _) in parts.items() if lease not in self._ended}

    def answered(self, own: Mapping[str, SlurmJob], steps: Mapping[tuple[str, str], str]) -> None:
        """Note the steps of the jobs that were due: (job, node) → step."""
        running = {lease for lease, job in own.items() if _in_block(job) in steps}
        missing = self._seen - running
        self._seen |= running
        # Twice, because a restarted controller may not know its steps yet.
        self._ended |= missing & self._missed
        self._missed = missing - self._ended

    @property
    def ended(self) -> frozenset[str]:
        """The leases whose agent has ended."""
        return frozenset(self._ended)


def _in_block(job: SlurmJob) -> tuple[str, str] | None:
    """Return the job and node of a lease in a block; None if it is not in one."""
    part = job.part
    if part is None or not part.removable or job.state not in RUNNING_STATES:
        return None
    return part.job, part.node
