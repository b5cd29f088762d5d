"""Nodes of a block whose agent has ended, while the other nodes of the job go on. Pure.

A job of one node ends with its agent. In a block each agent is a step of its own, and the end of
one changes nothing of the job. This module decides when Slurm is asked for steps, and whose has
ended.
"""

from __future__ import annotations

from collections.abc import Mapping

from scavenger.slurm.members import RUNNING_STATES
from scavenger.slurm.parse import SlurmJob

EVERY_S = 30.0
"""So often Slurm is asked which steps run, while there are blocks."""
ENDED = "its agent has ended, and other leases of its job go on"


class StepWatch:
    """Watches the steps of blocks. One that was never seen to start is none of its business."""

    def __init__(self) -> None:
        self._asked_at = 0.0
        self._seen: set[str] = set()
        """Leases whose step ran."""
        self._missed: set[str] = set()
        """Those whose step was not there when it was last asked for."""
        self._ended: set[str] = set()

    def due(self, own: Mapping[str, SlurmJob], now: float) -> set[str]:
        """The jobs whose steps should be asked for now (epoch seconds).

        Args:
            own: lease id → its job.
        """
        parts = {lease: part for lease, job in own.items() if (part := _in_block(job)) is not None}
        self._seen &= parts.keys()
        self._missed &= parts.keys()
        self._ended &= parts.keys()
        if not self._missed and 0 <= now - self._asked_at < EVERY_S:
            return set()
        self._asked_at = now
        return {job for lease, (job, _) in parts.items() if lease not in self._ended}

    def answered(self, own: Mapping[str, SlurmJob], steps: Mapping[tuple[str, str], str]) -> None:
        """What runs of the jobs that were due: (job, node) → step."""
        there = {lease for lease, job in own.items() if _in_block(job) in steps}
        gone = self._seen - there
        self._seen |= there
        # Twice: a controller that has just started may not know its steps yet.
        self._ended |= gone & self._missed
        self._missed = gone - self._ended

    @property
    def ended(self) -> frozenset[str]:
        """The leases whose agent has ended."""
        return frozenset(self._ended)


def _in_block(job: SlurmJob) -> tuple[str, str] | None:
    """Its job and node, if it runs as a node of a block."""
    part = job.part
    if part is None or not part.removable or job.state not in RUNNING_STATES:
        return None
    return part.job, part.node
