"""What every scheduler backend offers: gaps, leases, and nothing else.

The nouns are the same for Slurm, PBS, the embedded cluster and a replayed trace, so that knowing
one backend is knowing all. Calls are synchronous and may block (they run commands); the daemon
calls them from a worker thread and gives each a time limit. A failed call raises
:class:`SchedulerError` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class SchedulerError(RuntimeError):
    """The main scheduler could not be asked or refused; the message is a sentence for the
    operator.
    """


@dataclass(frozen=True)
class Gap:
    """One idle node that the main scheduler cannot fill now.

    ``horizon_s``: how long the gap is expected to last still, seconds; ``None`` when nothing is
    known.
    """

    node: str
    idle_since: float
    horizon_s: float | None = None
    node_class: str = "default"
    group: str | None = None


class LeaseState(str, Enum):
    """Where a lease stands in the main scheduler."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    NOT_YET = "not-yet"
    """It was not asked for: the site's pace allows no more just now. It may be asked for again."""


@dataclass(frozen=True)
class Lease:
    """MalleTrain's hold on one node, as the main scheduler knows it.

    ``id`` is MalleTrain's own name of the lease (unique, chosen by the daemon); ``scheduler_id`` is
    the main scheduler's job id. ``node`` is empty while the main scheduler has not placed it.
    ``gone_at`` (seconds since the epoch) is set while the main scheduler has asked for the node
    back, as far as it tells: by then the lease is killed. ``reason`` says why a lease is leaving or
    has ended. ``started`` and ``ended`` (seconds since the epoch): when, by the main scheduler's
    own account, None where that does not tell.
    """

    id: str
    scheduler_id: str
    state: LeaseState
    node: str = ""
    reason: str = ""
    gone_at: float | None = None
    started: float | None = None
    ended: float | None = None


@dataclass(frozen=True)
class LeaseRequest:
    """Ask for a lease on ``node``: run ``argv`` there with ``env`` added (no shell in between).

    ``duration_s``: limit of the lease in seconds, ``None`` for the site's default. ``owner``:
    account to submit as (site mode).
    """

    id: str
    node: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    duration_s: float | None = None
    owner: str | None = None


@dataclass(frozen=True)
class Explanation:
    """Why one node is or is not a gap: one answer per rule, for ``malletrain nodes --explain``."""

    node: str
    state: str
    is_gap: bool
    rules: tuple[tuple[str, bool, str], ...]
    """(rule, passed, sentence)"""


Foretelling = Mapping[str, tuple[float, tuple[tuple[float, ...], tuple[float, ...]]]]
"""Node → (expected remaining seconds of its gap, (seconds from now, probability that it is open
still then)). Nodes of which the very same object is told are expected to end together.
"""


@dataclass(frozen=True)
class PollResult:
    """One poll of the main scheduler, taken at ``time`` (seconds since the epoch).

    ``leases`` holds every pending and running lease of ours and those that ended recently: a lease
    that is not in it has ended.
    """

    time: float
    gaps: tuple[Gap, ...]
    leases: tuple[Lease, ...]
    total_nodes: int
    idle_nodes: int
    """Nodes that nobody of the main scheduler uses: gaps, leased nodes, and idle ones the rules
    leave alone.
    """
    explanations: Sequence[Explanation] = ()
    """Of every node; may be made one by one when it is looked at."""
    poll_again_s: float | None = None
    """When another poll will tell something new, seconds from now; None: whenever the daemon likes.
    """
    foretold: Foretelling = field(default_factory=dict)
    """How long the gaps last yet, those of leased nodes among them; empty where nothing is
    foretold.
    """
    room: int | None = None
    """Leases that may be asked for until the next poll, at the site's pace; None: any number."""


@dataclass(frozen=True)
class Contact:
    """How a scavenger and its main scheduler get on."""

    calls: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(command, outcome) → how often it was called so far."""
    busy_s: float = 0.0
    """The scheduler has too much to do: seconds for which it should not be asked again."""
    refused_s: float = 0.0
    """It refuses submissions: seconds for which some user's are held back."""
    busy: str = ""
    """The scheduler's words for having too much to do, until it answers again; empty: it does."""
    poll_after_s: float = 0.0
    """Another poll is within the site's budget of requests after so many seconds."""


class Scavenger(Protocol):
    """A connection to one main scheduler."""

    name: str

    def know(self, leases: Mapping[str, str], nodes: Mapping[str, str]) -> None:
        """Leases of the daemon's life before: id → the user that each was taken for, empty: the
        daemon's own; id → its node. Called before the first poll, so that nobody's jobs pass for
        leases of others; a scheduler of one user's needs nothing of it.
        """
        ...

    def poll(self) -> PollResult:
        """Gaps and our leases now. Raises SchedulerError when the scheduler cannot be asked."""
        ...

    def take(self, requests: Sequence[LeaseRequest]) -> list[Lease]:
        """Ask for leases. Returns one lease per request, in order; one that was refused is ENDED
        with the reason. It does not wait: what the site's pace does not allow now is NOT_YET. One
        failing does not fail the others. Asking again for an id that is known returns that lease
        and starts nothing.
        """
        ...

    def give_back(self, leases: Sequence[Lease]) -> None:
        """End leases (cancel when pending). Ending one that has ended already is no error."""
        ...

    def contact(self) -> Contact:
        """How it gets on with the scheduler. Asks nothing, and may be called at any time from any
        thread.
        """
        ...

    def check(self) -> list[tuple[bool, str]]:
        """(works, sentence) per thing tested against the live scheduler, for ``malletrain
        check``.
        """
        ...
