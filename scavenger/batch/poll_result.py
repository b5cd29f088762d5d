"""The result of one poll of a batch scheduler: its answer, and the conclusions. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from scavenger.batch.lease_ledger import LeaseJob
from scavenger.batch.rules import Choice, GapRules, NodeFacts
from scavenger.interface import Lease

Finding = tuple[bool | None, str]
"""(works, sentence); None: works but needs attention."""


class ConfiguredSite(Protocol):
    """The configuration of a scheduler, with the attributes that all kinds have."""

    @property
    def version(self) -> tuple[int, int]:
        """Version of its release, such as (23, 6)."""

    @property
    def display_name(self) -> str:
        """Its release and its own name, for sentences."""


SiteT = TypeVar("SiteT", bound=ConfiguredSite)


@dataclass(frozen=True)
class SchedulerAnswer:
    """The answer of a batch scheduler at one poll."""

    facts: Mapping[str, NodeFacts]
    """Node → its facts, for each node."""
    jobs: Mapping[str, LeaseJob]
    """Lease id → its job."""
    gone: Mapping[str, Lease] = field(default_factory=dict)
    """Leases whose jobs have disappeared since the previous poll."""
    hold: str = ""
    """Why no lease may be requested now; empty if leases may be."""
    node_holds: Mapping[str, str] = field(default_factory=dict)
    """Idle node → why it may not be requested."""
    leave: Mapping[str, str] = field(default_factory=dict)
    """Running lease → why it has to leave, for reasons specific to this scheduler."""
    leave_by: Mapping[str, float] = field(default_factory=dict)
    """Running lease → time by which it should have left if it leaves, epoch seconds, for leases
    that leave for a job that waits already."""
    urgent: bool = False
    """Whether nodes are being taken back, so that the next poll should come soon."""


@dataclass(frozen=True)
class PollConclusions(Generic[SiteT]):
    """The conclusions from one poll."""

    time: float
    """Time of the poll, epoch seconds."""
    site: SiteT
    """The scheduler's configuration."""
    answer: SchedulerAnswer
    """The scheduler's answer."""
    rules: GapRules
    """The rules that were applied."""
    leases: tuple[Lease, ...]
    """All our leases."""
    unwanted: list[LeaseJob]
    """Our jobs that have to be cancelled."""
    leave: Mapping[str, str]
    """Running lease → why it has to leave."""
    choice: Choice
    """The gaps."""
