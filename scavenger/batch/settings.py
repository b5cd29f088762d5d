"""What the scavenger of a batch scheduler is told by the site's configuration, and how long a lease
may be under it. Pure.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from scavenger.batch.groups import Shape
from scavenger.batch.rules import GapRules

SPREAD = 0.25
"""By so much of their usual time leases differ in length."""
LEAST_LIMIT_S = 60.0
"""No lease is shorter: starting a job takes part of it. Slurm counts time limits in whole minutes
anyway.
"""

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True)
class BatchSettings(Generic[OptionsT]):
    """How the site wants its gaps found and its leases asked for.

    ``tag``: tells our jobs from those of other MalleTrains on this machine. ``template``: batch
    script of a lease. ``lease``: what only this kind of scheduler knows, such as the queue.
    ``user``: this process's user; ``submit_as``: command put before those that submit and cancel
    for another owner, with ``{owner}`` in it. ``output_dir``: where the output of leases goes;
    None: nowhere.

    ``idle_for_s``: how long a node must be idle; None: one scheduling cycle. ``backfill``: no
    preemption is counted on, so every lease ends before the next known use of its node, and leaves
    ``spare_s`` of the time until then unused. ``time_limit_s``: the longest lease; ``time_min_s``:
    the shortest that is of use, None where the main scheduler need not fit leases in;
    ``min_lease_s``: the shortest that the site wants. ``lease_s``: how long one usually is, None:
    as long as the longest.

    ``start_within_s``: a lease that waits longer is withdrawn. ``submit_rate``: leases asked for
    per second in the long run, ``submit_burst``: at one moment. ``request_rate``: requests to the
    scheduler's controller per second in the long run. ``max_leases``: at once, and
    ``max_leases_per_user``; 0 for no limit. ``hold_s``: how long no lease is asked for after one
    was preempted, None: see
    :mod:`scavenger.batch.hold`. ``grace_s``: seconds from a preemption's signal to SIGKILL, None:
    what the main scheduler's configuration says. ``needed_grace_s``: what a job needs to leave in
    order. ``shape``: how leases that are asked for together become jobs, ``shared_by`` so many at
    most.
    """

    tag: str
    template: str
    lease: OptionsT
    rules: GapRules = field(default_factory=GapRules)
    user: str = ""
    submit_as: tuple[str, ...] = ()
    output_dir: Path | None = None
    idle_for_s: float | None = None
    node_classes: tuple[str, ...] = ()
    backfill: bool = False
    spare_s: float = 30.0
    time_limit_s: float = 12 * 3600.0
    lease_s: float | None = None
    time_min_s: float | None = None
    min_lease_s: float = 0.0
    start_within_s: float = 60.0
    submit_rate: float = 1.0
    submit_burst: float = 10.0
    request_rate: float = 2.0
    max_leases: int = 0
    max_leases_per_user: int = 0
    hold_s: float | None = None
    grace_s: float | None = None
    needed_grace_s: float = 0.0
    poll_interval_s: float = 5.0
    shape: Shape = "single"
    shared_by: int = 8

    @property
    def prefix(self) -> str:
        """What the names of our jobs begin with."""
        return f"malletrain-{self.tag}-"

    @property
    def owner(self) -> str:
        """The one user who has leases; empty: there may be several, in site mode."""
        return "" if self.submit_as else self.user

    @property
    def longest_pause_s(self) -> float:
        """The longest pause between two polls of a scheduler that is slow or silent: half of
        ``spare_s``. The other half is for the answer, so that a lease whose node is reserved still
        has its whole grace time before the reservation begins.
        """
        return max(self.poll_interval_s, self.spare_s / 2)

    @property
    def least_s(self) -> float:
        """The shortest lease that is asked for."""
        return max(LEAST_LIMIT_S, self.time_min_s or 0.0, self.min_lease_s)

    def rules_at(self, left_idle_s: float, partitions: Collection[str]) -> GapRules:
        """The rules for gaps, with what the scheduler's own configuration says where the site's
        says nothing: how long idle nodes are left to it, and where leases run.
        """
        rules = self.rules
        return replace(
            rules,
            idle_for_s=left_idle_s if self.idle_for_s is None else self.idle_for_s,
            partitions=rules.partitions or frozenset(filter(None, partitions)),
            use_planned=rules.use_planned or self.backfill,
            min_free_s=max(self.least_s + self.spare_s, rules.min_free_s),
        )

    def class_of(self, features: Collection[str]) -> str:
        """The class of a node with these features."""
        return next((name for name in self.node_classes if name in features), "default")

    def limit_s(self, lease: str, step_s: float, *within_s: float | None) -> float | None:
        """Time limit of a lease in seconds. None: too short to be of use.

        Leases that were asked for together must not end together, which would take all its nodes
        from a job at once: each has its own part, three quarters or more, of the usual time.

        Args:
            lease: its id.
            step_s: what limits are a multiple of, seconds.
            within_s: seconds from now within which it must end; None: no such end.
        """
        usual_s = min(self.lease_s or self.time_limit_s, self.time_limit_s)
        if self.lease_s is not None:
            usual_s *= 1.0 - SPREAD * zlib.crc32(lease.encode()) / 2**32
            usual_s = max(usual_s, min(self.min_lease_s, self.time_limit_s))
        longest = min([usual_s, *(s for s in within_s if s is not None)])
        limit = math.floor(longest / step_s + 1e-9) * step_s
        return limit if limit > 0 and limit >= min(self.least_s, self.time_limit_s) else None
