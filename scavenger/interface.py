"""The interface of every scheduler backend: gaps and leases, and nothing else.

The nouns are the same for Slurm, PBS, the embedded cluster and a replayed trace, so a reader who
knows one backend knows all. Calls are synchronous and can block (they run commands). The daemon
calls them from a worker thread with a time limit. A call that fails raises :class:`SchedulerError`
and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from scavenger.horizon import GapForecast


class SchedulerError(RuntimeError):
    """The main scheduler did not answer or refused the request. The message is a sentence for the
    operator.
    """


_SLOT = "/"


def slot_name(host: str, kind: str, number: int) -> str:
    """Return the name of a slot: ``c1/gpu.0``. If a site has kinds of slots, these names are used
    in place of names of nodes.

    Args:
        host: name of the host.
        kind: name of the kind of slots.
        number: number of the slot among those of its kind on the host, from 0.
    """
    return f"{host}{_SLOT}{kind}.{number}"


def host_of(node: str) -> str:
    """Return the host of a node or slot: ``c1`` for ``c1`` and for ``c1/gpu.0``."""
    return node.partition(_SLOT)[0]


def kind_of(node: str) -> str:
    """Return the kind of a slot: ``gpu`` for ``c1/gpu.0``; empty for a whole node."""
    return node.partition(_SLOT)[2].rpartition(".")[0]


@dataclass(frozen=True)
class Gap:
    """One idle node, or slot of a host, that the main scheduler cannot fill now."""

    node: str
    """Name of the node or slot."""
    idle_since: float
    """Start of the gap, epoch seconds."""
    horizon_s: float | None = None
    """Expected remaining length of the gap, seconds; None if it is not known."""
    node_class: str = "default"
    """Class of the node: nodes of one class are interchangeable."""
    group: str | None = None
    """Topology group of the node, for a slot its host; None if unknown."""


class LeaseState(str, Enum):
    """State of a lease in the main scheduler."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    NOT_YET = "not-yet"
    """The lease was not requested, because the site's submission rate allows no more now. It can be
    requested again.
    """


@dataclass(frozen=True)
class Lease:
    """MalleTrain's hold on one node, as the main scheduler reports it."""

    id: str
    """MalleTrain's own name of the lease: unique, chosen by the daemon."""
    scheduler_id: str
    """The main scheduler's job id."""
    state: LeaseState
    """State in the main scheduler."""
    node: str = ""
    """Node of the lease; empty until the main scheduler places it."""
    reason: str = ""
    """Why the lease is leaving or has ended."""
    gone_at: float | None = None
    """Time by which the lease is killed, epoch seconds, as far as the main scheduler reports
    it. Set while the main scheduler asks for the node back.
    """
    started: float | None = None
    """Start time that the main scheduler reports, epoch seconds; None if it reports none."""
    ended: float | None = None
    """End time that the main scheduler reports, epoch seconds; None if it reports none."""
    ends_by: float | None = None
    """End of the time limit of a running lease, epoch seconds; None: no limit, or not known. Not
    set while the lease is leaving.
    """
    leave_by: float | None = None
    """Time by which it should have left, epoch seconds, if that is earlier than ``gone_at``: a job
    has waited for its node for some time. None: it has until then.
    """


@dataclass(frozen=True)
class LeaseRequest:
    """A request for a lease on ``node``, which runs ``argv`` there with ``env`` added (without a
    shell).
    """

    id: str
    """Unique name of the lease, chosen by the daemon."""
    node: str
    """Name of the node."""
    argv: tuple[str, ...]
    """Command to run on the node."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to add."""
    duration_s: float | None = None
    """Time limit of the lease, seconds; None: the site's default."""
    owner: str | None = None
    """Account to submit as (site mode)."""


@dataclass(frozen=True)
class Explanation:
    """Why one node is or is not a gap: the result of each rule, for ``malletrain nodes
    --explain``.
    """

    node: str
    """Name of the node."""
    state: str
    """The main scheduler's name of its state."""
    is_gap: bool
    """Whether it is a gap."""
    rules: tuple[tuple[str, bool, str], ...]
    """(rule, passed, sentence)"""


@dataclass(frozen=True)
class PollResult:
    """The result of one poll of the main scheduler."""

    time: float
    """Time of the poll, epoch seconds."""
    gaps: tuple[Gap, ...]
    """The present gaps."""
    leases: tuple[Lease, ...]
    """All our pending and running leases, and those that ended recently. A lease that is not in
    it has ended.
    """
    total_nodes: int
    """Number of nodes of the machine."""
    idle_nodes: int
    """Number of nodes that no main job uses: gaps, leased nodes, and idle nodes that the rules
    exclude.
    """
    explanations: Sequence[Explanation] = ()
    """One for each node. The sequence may compute each item when it is accessed."""
    poll_again_s: float | None = None
    """Seconds from now until another poll will show something new; None if the daemon may choose.
    """
    forecasts: Mapping[str, GapForecast] = field(default_factory=dict)
    """Forecasts of the present gaps, including those of leased nodes; empty if there are no
    forecasts.
    """
    kind_parts: Mapping[str, float] = field(default_factory=dict)
    """Kind of slots → the part of a host that one of its slots is; empty without slots."""
    max_new_leases: int | None = None
    """Number of leases that may be requested until the next poll at the site's submission rate;
    None: no limit.
    """
    trouble: str = ""
    """A sentence about what failed beside the poll, such as the deletion of old files; empty if
    nothing did.
    """


@dataclass(frozen=True)
class Contact:
    """Condition of the connection between a scavenger and its main scheduler."""

    calls: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(command, outcome) → number of calls so far."""
    busy_s: float = 0.0
    """Seconds for which the scheduler should not be asked, because it is overloaded; 0 if it can be
    asked.
    """
    refused_s: float = 0.0
    """Seconds for which submissions of at least one user are paused, because the scheduler refused
    them.
    """
    busy: str = ""
    """The scheduler's message that it is overloaded, until it answers again; empty if it is not."""
    poll_after_s: float = 0.0
    """Seconds after which another poll fits the site's request budget."""


class Scavenger(Protocol):
    """A connection to one main scheduler."""

    name: str

    def know(
        self, leases: Mapping[str, str], nodes: Mapping[str, str], jobs: Mapping[str, str]
    ) -> None:
        """Register the leases that were taken before the daemon's restart. Called before the first
        poll, so that the scavenger recognises these leases. A scheduler with a single user does not
        need it.

        Args:
            leases: lease id → user for whom it was taken; empty: the daemon's own user.
            nodes: lease id → its node.
            jobs: lease id → its ``scheduler_id``; empty if it is not known.
        """
        ...

    def poll(self) -> PollResult:
        """Return the present gaps and our leases. Raises SchedulerError if the scheduler does not
        answer.
        """
        ...

    def take(self, requests: Sequence[LeaseRequest]) -> list[Lease]:
        """Request leases, without waiting.

        A request that fails does not affect the others. A request for an id that is already known
        returns its lease and starts nothing.

        Returns:
            One lease per request, in order. A refused one is ENDED, with the reason. One for which
                the site's submission rate leaves no room is NOT_YET.
        """
        ...

    def give_back(self, leases: Sequence[Lease]) -> None:
        """End leases; pending ones are cancelled. Leases that have already ended are ignored.
        Raises SchedulerError if one may still exist.
        """
        ...

    def contact(self) -> Contact:
        """Return the condition of the connection. Sends no request, and can be called at any time
        from any thread.
        """
        ...

    def check(self) -> list[tuple[bool | None, str]]:
        """Return (works, sentence) for each test against the live scheduler, for ``malletrain
        check``; None instead of True: works but needs attention.
        """
        ...
