"""The actions that a job's rounds request and the daemon carries out in order. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from malletrain.protocol.messages import Failure


@dataclass(frozen=True)
class SendAssign:
    """Start the job's launcher on ``node``."""

    node: str


@dataclass(frozen=True)
class SendRelease:
    """Stop everything of the job on ``node``."""

    node: str


@dataclass(frozen=True)
class SendDrain:
    """Have the worker of rank 0 on ``node`` take a snapshot and wait (``number`` 0: train
    on).
    """

    node: str
    generation: int
    number: int
    heirs: tuple[str, ...] = ()
    """Where those of the next round have a memory for it, the first rank first."""


@dataclass(frozen=True)
class SaveRound:
    """Write the new generation and its members to the store before anybody hears of it."""

    generation: int
    members: tuple[str, ...]
    because_lost: bool = False
    """A rescale that nobody planned: the members that are left go on."""


@dataclass(frozen=True)
class SendRound:
    """Tell ``node`` its place; without a store it is the one to serve it."""

    node: str
    generation: int
    rank: int
    size: int
    store: tuple[str, int] | None


@dataclass(frozen=True)
class SendAbort:
    """Have the live workers on ``node`` give up the step they are in: a member of round
    ``generation`` is lost.
    """

    node: str
    generation: int


@dataclass(frozen=True)
class SendView:
    """Tell ``node`` who the members of a service are: (node, address, when it leaves) of each, in
    rank order.
    """

    node: str
    generation: int
    members: tuple[tuple[str, str, float | None], ...]


@dataclass(frozen=True)
class Formed:
    """All members run. Comes again with the same generation where a change of the target turned out
    to need no new round.
    """

    generation: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class AllUp:
    """Every process of a service's target is there; those that were there never stopped."""

    generation: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class Broke:
    """The job's own workers failed; the first cause first."""

    failures: tuple[Failure, ...]
    sentence: str
    expected: bool = False
    """They hung, which has counted as a failure: that they end of it is none more."""


@dataclass(frozen=True)
class WorkersDone:
    """Every worker ended well."""


@dataclass(frozen=True)
class NodesRejected:
    """The job rejects these nodes: its launcher did not come up there. It goes on without them."""

    nodes: tuple[str, ...]
    sentence: str
    unfit: bool = False
    """The job's software cannot be had there, nor was it on any other node of the plan."""


Action = (
    SendAssign
    | SendRelease
    | SendDrain
    | SendAbort
    | SaveRound
    | SendRound
    | SendView
    | Formed
    | AllUp
    | Broke
    | WorkersDone
    | NodesRejected
)
