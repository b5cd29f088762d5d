"""When not to ask for leases because Slurm is just taking some back.

A main job may need more nodes than those it preempts leases on, and counts on idle ones too without marking them as planned (seen with
Slurm 22.05). A lease that takes one of them in that moment makes Slurm preempt once more, which it does only after more than ten seconds.
So while a lease is leaving, and for a while after, no other is asked for, and those that still wait are withdrawn.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from scavenger.slurm_parse import Job
from scavenger.slurm_state import ENDED_STATES, PENDING_STATES

HOLD_S = (3.0, 15.0)
"""Least and longest hold after the last sign of a preemption; in between, one backfill cycle."""


class Hold:
    """Watches our jobs from poll to poll for ends that come before their time."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}
        """Lease id → when its job would end by its time limit."""
        self._alive: set[str] = set()
        self._taken_at = float("-inf")

    def look(self, own: Mapping[str, Job], given_up: Container[str], hold_s: float, now: float) -> str:
        """Why no lease may be asked for now; empty when they may. ``given_up``: leases that end because we wanted it."""
        for lease_id, job in own.items():
            if lease_id in given_up or job.state in PENDING_STATES or job.end is None:
                continue
            ended = job.state in ENDED_STATES
            early = job.end < self._ends.setdefault(lease_id, job.end) - 1.0
            if early and (not ended or lease_id in self._alive):
                self._taken_at = now
        self._ends = {lease_id: end for lease_id, end in self._ends.items() if lease_id in own}
        self._alive = {lease_id for lease_id, job in own.items() if job.state not in ENDED_STATES}
        since = now - self._taken_at
        return f"the main scheduler took leases back {since:.0f} s ago and may need more nodes" if 0 <= since < hold_s else ""
