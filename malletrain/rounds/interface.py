"""The interface between the daemon and the rounds of a job, for every mode.

:class:`Rounds` is what a mode implements. It answers with the actions that the daemon carries out
in order. :class:`RoundSettings` holds the time limits of a rescale, and decides how a preemption
shortens them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from malletrain.protocol.messages import Assignment, Failure

DRAIN_FRACTION = 0.6
"""Maximum fraction of the remaining time of a leaving node that a drain takes."""
DRAIN_AND_WAIT_FRACTION = 0.9
"""Maximum fraction of that time for a drain and a wait for joiners together."""
END_MARGIN = 0.95
"""Factor on the time until an agent stops the processes of a leaving node."""
MIN_LIMIT_S = 0.2
"""Minimum of a drain and of the time for processes to end, seconds, however soon the node is
gone.
"""


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
    nodes: tuple[str, ...] = ()
    """Nodes on which workers of a round failed by themselves. Empty for a service, and for
    launchers that ended before they entered a round.
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


@dataclass(frozen=True)
class RoundSettings:
    """Time limits in seconds, and the hosts of nodes."""

    warmup_s: float = 60.0
    """Maximum time for joiners to start while the others train, or while no node can train without
    them.
    """
    warmup_blocking_s: float = 15.0
    """Maximum time for joiners to start while the remaining members wait for them, although they
    could train without them.
    """
    drain_s: float = 10.0
    """Maximum time for a snapshot, or for a service's process to hand over its data."""
    join_s: float = 60.0
    """Maximum time for all members to join a round."""
    failure_grace_s: float = 2.5
    """Time that a failure waits for a report that a node was lost."""
    joiner_grace_s: float = 1.0
    """Maximum time that a preempted node is held for joiners, if the job cannot continue without
    them.
    """
    stop_s: float = 5.0
    """Time between SIGTERM and SIGKILL."""
    host_of: Callable[[str], str] = str
    """Returns the host of a node. Several slots can have one host; a whole node is its own."""

    def by_host(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return the nodes with those of one host beside each other, and otherwise in their order:
        the first node stays first.
        """
        on_host: dict[str, list[str]] = {}
        for node in nodes:
            on_host.setdefault(self.host_of(node), []).append(node)
        return tuple(node for names in on_host.values() for node in names)

    def drain_limit_s(self, within_s: float | None) -> float:
        """Return the seconds for a drain if a node is gone in ``within_s`` (None: no node
        leaves). A drain takes at most :data:`DRAIN_FRACTION` of that time; the rest is for the wait
        for joiners and for the end of the processes.
        """
        if within_s is None:
            return self.drain_s
        return max(MIN_LIMIT_S, min(self.drain_s, within_s * DRAIN_FRACTION))

    def self_exit_limit_s(self, within_s: float) -> float:
        """Return the seconds that a process gets to end by itself if its node is gone in
        ``within_s``. After that its agent stops it: ``stop_s`` and a second before the node is
        gone, or at half of the time if that is later. The result is below that time by a factor
        of :data:`END_MARGIN`, so that the round decides before the agent does.
        """
        agent_stops_in_s = within_s - min(self.stop_s + 1.0, within_s / 2)
        return max(MIN_LIMIT_S, END_MARGIN * agent_stops_in_s)

    def joiner_wait_s(self, within_s: float) -> float:
        """Return how long to wait for joiners that the job cannot train without, if a node is gone
        in ``within_s``, seconds. The time is short, because a main job waits for that node. This
        wait and the drain take at most :data:`DRAIN_AND_WAIT_FRACTION` of ``within_s``.
        """
        remaining_s = within_s * DRAIN_AND_WAIT_FRACTION - self.drain_limit_s(within_s)
        return max(0.0, min(self.joiner_grace_s, remaining_s))


View = tuple[ViewMember, ...]
"""Members of a service, in rank order."""


class RoundStage(str, Enum):
    """Stage of a job's rescale. :data:`STAGES` describes each stage."""

    IDLE = "idle"
    WARMING = "warming"
    DRAINING = "draining"
    FORMING = "forming"
    RUNNING = "running"
    FINISHING = "finishing"
    COMPLETED = "completed"

    __str__ = str.__str__  # its value, in sentences too


STAGES: dict[RoundStage, str] = {
    RoundStage.IDLE: "No round runs or is being formed. The next plan starts one.",
    RoundStage.WARMING: "The launchers of joiners start while the others continue to train.",
    RoundStage.DRAINING: "The workers save their progress. Only in restart mode, unless a live "
    "job releases all its nodes.",
    RoundStage.FORMING: "The members receive the new round and join it.",
    RoundStage.RUNNING: "Every member of the newest round runs. For a service: it has a member.",
    RoundStage.FINISHING: "A change of nodes waits for the end of the script, which has ended "
    "somewhere or runs the code after its training.",
    RoundStage.COMPLETED: "All workers have ended without error.",
}


class Rounds(Protocol):
    """The rescales of one job. Every method returns the actions to carry out, in order."""

    @property
    def generation(self) -> int:
        """Number of the newest round."""

    @property
    def stage(self) -> RoundStage:
        """Current stage of the rescale."""

    @property
    def target(self) -> tuple[str, ...]:
        """The nodes of the newest plan. Other nodes that hold the job are leaving it."""

    @property
    def members(self) -> tuple[str, ...]:
        """The nodes of the newest round, in rank order."""

    @property
    def view(self) -> View:
        """The members of a service; empty for other jobs."""

    @property
    def drain_s(self) -> float:
        """Current maximum time of a drain, seconds."""

    min_nodes: int
    """Minimum number of nodes on which the job trains."""

    @property
    def lost_member(self) -> bool:
        """Whether a member was lost since the newest round was formed."""

    @property
    def finishing(self) -> bool:
        """Whether the script has ended somewhere or runs the code after its training. It makes no
        more steps, and is not restarted because nodes change.
        """

    @property
    def between_epochs(self) -> bool:
        """Whether the script is in the code after the steps of an epoch."""

    @property
    def interrupts(self) -> bool:
        """Whether the job processes no samples during a rescale."""

    def move(self, nodes: Iterable[str], now: float, within_s: float | None = None) -> list[Action]:
        """Move to exactly ``nodes`` (none: release all).

        Args:
            nodes: the nodes of the new plan, in order.
            now: time on the daemon's clock, seconds.
            within_s: seconds until a node of the old set is gone; None if none leaves.
        """

    def stop(self) -> list[Action]:
        """Release every node, because the job has ended."""

    def adopt(
        self, generation: int, members: Iterable[str], phases: dict[str, Assignment], now: float
    ) -> list[Action]:
        """Adopt the state that agents report after a restart of the daemon.

        Args:
            generation: the newest round in the store.
            members: its members, in rank order.
            phases: node → assignment, for all nodes that hold the job.
            now: time on the daemon's clock, seconds.
        """

    def phase(self, node: str, assignment: Assignment, now: float) -> list[Action]:
        """Handle the assignment that the agent on ``node`` reports."""

    def store_up(self, node: str, generation: int, host: str, port: int) -> list[Action]:
        """Note the address of the round's store, which the node of rank 0 serves."""

    def drained(self, node: str, generation: int, now: float, number: int = 0) -> list[Action]:
        """Note that the requested drain is done, or that there is nothing to save.

        Args:
            node: the node that reports it.
            generation: its round.
            now: time on the daemon's clock, seconds.
            number: number of the drain request; 0 if unknown.
        """

    def released(self, node: str, now: float) -> list[Action]:
        """Note that no process of the job is left on ``node``."""

    def gone(self, node: str, now: float) -> list[Action]:
        """Handle the loss of a node."""

    def unreachable(self, node: str) -> None:
        """Note that the agent on ``node`` cannot be reached. Failures of its peers may come from
        its loss.
        """

    def reachable(self, node: str) -> None:
        """Note that the agent on ``node`` can be reached again."""

    def occupied(self, node: str) -> None:
        """Note that another job is still leaving ``node``. The launcher starts when that job has
        left, with no time limit.
        """

    def doubt(self, node: str, over: bool) -> list[Action]:
        """Hold back a failure on ``node`` that the node may have caused; ``over``: the node did not
        cause it.
        """

    def give_up(self) -> list[Action]:
        """Give up the hanging workers of the round. The next plan restarts them without waiting for
        their reports.
        """

    def outdate(self) -> None:
        """Form a new round with the next plan, even if its nodes are the members of the newest
        round: they are used in another layout.
        """

    def tick(self, now: float) -> list[Action]:
        """Handle the time limits that have passed."""

    def postpone(self, by_s: float) -> None:
        """Extend all running time limits by a time in which no agent could be reached."""

    def hasten(self, node: str, now: float, within_s: float) -> list[Action]:
        """Shorten the time limits of a departure that has begun.

        Args:
            node: a node that is leaving.
            now: time on the daemon's clock, seconds.
            within_s: seconds until it is gone, fewer than was known.
        """

    def next_wakeup(self) -> float | None:
        """Return the time at which :meth:`tick` is due; None if no time limit runs."""
