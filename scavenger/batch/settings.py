"""Settings of a batch scheduler's scavenger from the site's configuration, and the time limit of a
lease. Pure.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from scavenger.batch.groups import Shape
from scavenger.batch.rules import GapRules, NodeFacts
from scavenger.batch.slots import SlotKind

SPREAD = 0.25
"""Maximum fraction by which the time limit of a lease is shortened, so that leases end at different
times.
"""
MIN_LIMIT_S = 60.0
"""Minimum time limit of a lease, seconds: starting a job takes part of it. Slurm counts time limits
in whole minutes anyway.
"""

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True)
class BatchSettings(Generic[OptionsT]):
    """The site's settings for finding gaps and requesting leases. Times are in seconds."""

    tag: str
    """Distinguishes our jobs from those of other MalleTrains on this machine."""
    template: str
    """Batch script of a lease."""
    lease: OptionsT
    """Settings that only this kind of scheduler has, such as the queue."""
    rules: GapRules = field(default_factory=GapRules)
    """Rules that decide which nodes are gaps."""
    user: str = ""
    """This process's user."""
    submit_as: tuple[str, ...] = ()
    """Command prefix to submit and cancel for another owner, with ``{owner}`` in it."""
    output_dir: Path | None = None
    """Directory for the output of leases; None: it is discarded."""
    idle_for_s: float | None = None
    """Minimum idle time of a node; None: one scheduling cycle."""
    node_classes: tuple[str, ...] = ()
    """Features that are names of node classes."""
    backfill: bool = False
    """Whether leases cannot be preempted, so that each must end ``spare_s`` before the next known
    use of its node.
    """
    spare_s: float = 30.0
    """Time that a lease leaves unused before the next known use of its node."""
    time_limit_s: float = 12 * 3600.0
    """Maximum length of a lease."""
    lease_s: float | None = None
    """Usual length, None: ``time_limit_s``."""
    time_min_s: float | None = None
    """Minimum useful length, None if the main scheduler need not fit leases into the schedule."""
    min_lease_s: float = 0.0
    """Minimum length that the site wants."""
    start_within_s: float = 60.0
    """Maximum time from submission to start; then a lease is withdrawn."""
    submit_rate: float = 1.0
    """Lease submissions per second on average."""
    submit_burst: float = 10.0
    """Maximum number of lease submissions at one time."""
    request_rate: float = 2.0
    """Requests to the scheduler's controller per second on average."""
    max_leases: int = 0
    """Maximum number of leases at one time; 0 for no limit."""
    max_leases_per_user: int = 0
    """Maximum number of leases of one user at one time; 0 for no limit."""
    hold_s: float | None = None
    """Pause in requests after a preemption, None: see :mod:`scavenger.batch.lease_request`."""
    grace_s: float | None = None
    """Time from a preemption's signal to SIGKILL, None: from the main scheduler's configuration."""
    needed_grace_s: float = 0.0
    """Time that a job needs to leave in order."""
    poll_interval_s: float = 5.0
    """Time between two polls."""
    shape: Shape = "single"
    """How leases that are requested together become jobs."""
    shared_by: int = 8
    """Maximum number of leases that share a job."""
    slots: tuple[SlotKind, ...] = ()
    """Kinds of slots; empty: a lease is a whole node."""

    @property
    def prefix(self) -> str:
        """Beginning of the names of our jobs."""
        return f"malletrain-{self.tag}-"

    @property
    def owner(self) -> str:
        """The one user who has leases; empty if there can be several, in site mode."""
        return "" if self.submit_as else self.user

    @property
    def max_pause_s(self) -> float:
        """Maximum pause between two polls of a scheduler that is slow or does not answer, seconds:
        half of ``spare_s``. The other half is for the answer, so that a lease on a node with a
        reservation still has its whole grace time before the reservation begins.
        """
        return max(self.poll_interval_s, self.spare_s / 2)

    @property
    def min_length_s(self) -> float:
        """Minimum length of a lease, seconds."""
        return max(MIN_LIMIT_S, self.time_min_s or 0.0, self.min_lease_s)

    def rules_at(self, left_idle_s: float, partitions: Collection[str]) -> GapRules:
        """Return the rules for gaps. Settings that the site does not configure come from the
        scheduler's configuration.

        Args:
            left_idle_s: time for which idle nodes are left to the scheduler, seconds.
            partitions: partitions in which leases run.
        """
        rules = self.rules
        return replace(
            rules,
            idle_for_s=left_idle_s if self.idle_for_s is None else self.idle_for_s,
            partitions=rules.partitions or frozenset(filter(None, partitions)),
            use_planned=rules.use_planned or self.backfill,
            min_free_s=max(self.min_length_s + self.spare_s, rules.min_free_s),
        )

    def class_of(self, node: NodeFacts) -> str:
        """Return the class of a node: by its features, or the kind of the slot."""
        return node.kind or next((c for c in self.node_classes if c in node.features), "default")

    def slot_kind(self, name: str) -> SlotKind | None:
        """Return the kind of slots with this name; None if there is none."""
        return next((kind for kind in self.slots if kind.name == name), None)

    def limit_s(self, lease: str, step_s: float, *ends_in_s: float | None) -> float | None:
        """Return the time limit of a lease, seconds; None if it is too short to be useful.

        Leases that were requested together must not end together, because a job would lose all its
        nodes at once. So each lease gets its own fraction, at least three quarters, of the usual
        length.

        Args:
            lease: its id.
            step_s: time limits are multiples of this, seconds.
            ends_in_s: seconds from now within which it must end; None: no such limit.
        """
        usual_s = min(self.lease_s or self.time_limit_s, self.time_limit_s)
        if self.lease_s is not None:
            usual_s *= 1.0 - SPREAD * zlib.crc32(lease.encode()) / 2**32
            usual_s = max(usual_s, min(self.min_lease_s, self.time_limit_s))
        max_s = min([usual_s, *(s for s in ends_in_s if s is not None)])
        limit = math.floor(max_s / step_s + 1e-9) * step_s
        return limit if limit > 0 and limit >= min(self.min_length_s, self.time_limit_s) else None
