"""The actions that a job's rounds request and the daemon carries out in order. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from malletrain.protocol.messages import Failure


@dataclass(frozen=True)
class SendAssign:
    """Start the launcher of the job on ``node``."""

    node: str


@dataclass(frozen=True)
class SendRelease:
    """Stop everything of the job on ``node``."""

    node: str


@dataclass(frozen=True)
class SendDrain:
    """Ask the worker of rank 0 on ``node`` to take a snapshot and wait (``number`` 0: to continue
    training).
    """

    node: str
    generation: int
    number: int
    """Number of the drain request; 0 cancels it."""
    heirs: tuple[str, ...] = ()
    """Addresses of the keepers of the next round's members that can hold it in memory, in rank
    order.
    """


@dataclass(frozen=True)
class SaveRound:
    """Write the new generation and its members to the store before they are sent."""

    generation: int
    members: tuple[str, ...]
    because_lost: bool = False
    """Whether it is an unplanned rescale, in which the remaining members continue."""


@dataclass(frozen=True)
class SendRound:
    """Send ``node`` its rank in the round. If ``store`` is None, the node serves the store."""

    node: str
    generation: int
    rank: int
    size: int
    store: tuple[str, int] | None
    samples: tuple[tuple[str, str], ...] = ()
    """Members that serve the samples of data caches: (node, address), in rank order."""


@dataclass(frozen=True)
class SendAbort:
    """Ask the live workers on ``node`` to abort their step, because a member of round
    ``generation`` is lost.
    """

    node: str
    generation: int


class ViewMember(NamedTuple):
    """One member of a service."""

    node: str
    address: str
    leaves_at: float | None = None
    """Time at which it leaves at the latest, seconds; None if no end is known."""
    loading: bool = False
    """Whether it is not ready to serve yet."""


@dataclass(frozen=True)
class SendView:
    """Send ``node`` the members of a service, in rank order."""

    node: str
    generation: int
    members: tuple[ViewMember, ...]


@dataclass(frozen=True)
class StartMeasured:
    """The process of a service on ``node`` is ready, ``seconds`` after its start."""

    node: str
    seconds: float


@dataclass(frozen=True)
class WorkersRunning:
    """The workers of all members run. Repeated with the same generation if a change of the target
    needed no new round.
    """

    generation: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class AllUp:
    """Every process of a service's target runs. Earlier members were not stopped."""

    generation: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class Broke:
    """The job's own workers failed. ``failures``: the original cause first."""

    failures: tuple[Failure, ...]
    sentence: str
    """Reason for users."""
    expected: bool = False
    """Whether the failure does not count: the workers hung, which was reported, or restart after a
    loss.
    """


@dataclass(frozen=True)
class WorkersDone:
    """All workers have ended without error."""


@dataclass(frozen=True)
class NodesRejected:
    """The job rejects these nodes, because its launcher or workers did not start there. It
    continues without them.
    """

    nodes: tuple[str, ...]
    sentence: str
    """Reason for users."""
    unfit: bool = False
    """Whether the job's software is available neither there nor on any other node of the plan."""


Action = (
    SendAssign
    | SendRelease
    | SendDrain
    | SendAbort
    | SaveRound
    | SendRound
    | SendView
    | StartMeasured
    | WorkersRunning
    | AllUp
    | Broke
    | WorkersDone
    | NodesRejected
)
