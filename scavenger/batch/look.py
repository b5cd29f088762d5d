"""What a look at a batch scheduler brings: what it said, and what was concluded from that. Values
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from scavenger.batch.lease_ledger import LeaseJob
from scavenger.batch.rules import Choice, GapRules, NodeFacts
from scavenger.interface import Lease

Finding = tuple[bool, str]
"""(works, sentence)."""


class ConfiguredSite(Protocol):
    """What is configured at a scheduler, as far as all kinds have it."""

    @property
    def version(self) -> tuple[int, int]:
        """Of its release, such as (23, 6)."""

    @property
    def called(self) -> str:
        """Its release and its own name, for sentences."""


SiteT = TypeVar("SiteT", bound=ConfiguredSite)


@dataclass(frozen=True)
class SchedulerAnswer:
    """What a batch scheduler said at one look."""

    facts: Mapping[str, NodeFacts]
    """Of every node."""
    jobs: Mapping[str, LeaseJob]
    """Lease id → its job."""
    gone: Mapping[str, Lease] = field(default_factory=dict)
    """Leases whose jobs were there before and are no more."""
    hold: str = ""
    """Why no lease may be asked for now."""
    node_holds: Mapping[str, str] = field(default_factory=dict)
    """Idle node → why this one may not be asked for."""
    leave: Mapping[str, str] = field(default_factory=dict)
    """Running leases that have to leave for a reason of this scheduler's, and why."""
    urgent: bool = False
    """Nodes are just being taken back: the next look should come soon."""
    requested: float | None = None
    """Nodes that the waiting jobs of others ask for; None: not shown."""


@dataclass(frozen=True)
class LookResult(Generic[SiteT]):
    """What was concluded from one look."""

    time: float
    site: SiteT
    answer: SchedulerAnswer
    rules: GapRules
    leases: tuple[Lease, ...]
    unwanted: list[LeaseJob]
    """Jobs of ours that have to be cancelled."""
    leave: Mapping[str, str]
    """Running leases that have to leave, and why."""
    choice: Choice
