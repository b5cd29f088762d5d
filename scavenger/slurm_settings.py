"""What the scavenger of Slurm is told by the site's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from scavenger.rules import GapRules
from scavenger.slurm_job import LeaseOptions


@dataclass(frozen=True)
class SlurmSettings:
    """``tag``: tells our jobs from those of other MalleTrains on this machine. ``template``: batch script of a lease. ``idle_for_s`` None:
    one backfill cycle. ``backfill``: no preemption is counted on, so every lease ends before the next known use of its node, and leaves
    ``spare_s`` of the time until then unused. ``start_within_s``: a lease that waits longer is withdrawn. ``submit_rate``: leases asked for
    per second. ``max_leases``: 0 for no limit. ``hold_s``: how long no lease is asked for after one was preempted for an unknown job, None:
    see :mod:`scavenger.slurm_hold`. ``wanted_grace_s``: what a job needs to leave in order. ``user``: this process's user."""

    tag: str
    template: str
    lease: LeaseOptions = field(default_factory=LeaseOptions)
    rules: GapRules = field(default_factory=GapRules)
    idle_for_s: float | None = None
    node_classes: tuple[str, ...] = ()
    backfill: bool = False
    spare_s: float = 30.0
    start_within_s: float = 60.0
    submit_rate: float = 20.0
    max_leases: int = 0
    hold_s: float | None = None
    wanted_grace_s: float = 0.0
    poll_interval_s: float = 5.0
    user: str = ""

    @property
    def prefix(self) -> str:
        """What the names of our jobs begin with."""
        return f"malletrain-{self.tag}-"

    @property
    def partition(self) -> str:
        """The partition of the leases; the first of several."""
        return self.lease.partition.partition(",")[0]
