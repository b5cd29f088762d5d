"""What the daemon calls on a job's rounds, whatever the job's mode."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from malletrain.protocol.messages import Assignment
from malletrain.rounds.actions import Action

View = tuple[tuple[str, str, float | None], ...]
"""The members of a service: (node, address, when it leaves) of each, in rank order."""


class RoundStage(str, Enum):
    """Where the job's rescale stands; :data:`STAGES` says what each stage means."""

    IDLE = "idle"
    WARMING = "warming"
    DRAINING = "draining"
    FORMING = "forming"
    RUNNING = "running"
    FINISHING = "finishing"
    COMPLETED = "completed"

    __str__ = str.__str__  # its value, in sentences too


STAGES: dict[RoundStage, str] = {
    RoundStage.IDLE: "No round runs or is being made; the next plan begins one.",
    RoundStage.WARMING: "The launchers of joiners come up while the others train on.",
    RoundStage.DRAINING: "The workers save what is done so far; restart mode only, unless a live "
    "job lets go of all its nodes.",
    RoundStage.FORMING: "The members are told of the new round and join it.",
    RoundStage.RUNNING: "Every member of the newest round runs; of a service: somebody is there.",
    RoundStage.FINISHING: "A change of nodes waits for the end of the script, which is done "
    "somewhere or in the code after its training.",
    RoundStage.COMPLETED: "Every worker ended well.",
}


class Rounds(Protocol):
    """The rescales of one job. Every method returns the actions to carry out, in order."""

    @property
    def generation(self) -> int:
        """Of the newest round."""

    @property
    def stage(self) -> RoundStage:
        """Where the rescale stands."""

    @property
    def target(self) -> tuple[str, ...]:
        """The nodes of the newest plan; others that hold the job are on their way out of it."""

    @property
    def members(self) -> tuple[str, ...]:
        """The nodes of the newest round, in rank order."""

    @property
    def view(self) -> View:
        """The members of a service; of other jobs empty."""

    @property
    def drain_s(self) -> float:
        """Seconds that a drain may take now."""

    min_nodes: int
    """Fewer train not at all."""

    @property
    def lost_member(self) -> bool:
        """Whether a member was lost since the newest round was formed."""

    @property
    def finishing(self) -> bool:
        """Whether the script is done somewhere, or in the code after its training: it makes no
        steps any more, and is not run again because nodes change.
        """

    @property
    def between_epochs(self) -> bool:
        """Whether the script is in the code after the steps of an epoch."""

    @property
    def interrupts(self) -> bool:
        """Whether no sample is processed while it changes its nodes."""

    def move(self, nodes: Iterable[str], now: float, within_s: float | None = None) -> list[Action]:
        """Go to exactly ``nodes`` (none: let go of all). ``within_s``: a node of the old set is
        gone by then.
        """

    def stop(self) -> list[Action]:
        """The job has ended: release every node."""

    def adopt(
        self, generation: int, members: Iterable[str], phases: dict[str, Assignment], now: float
    ) -> list[Action]:
        """After a restart of the daemon: take over what the agents report, all nodes that hold the
        job included.
        """

    def phase(self, node: str, assignment: Assignment, now: float) -> list[Action]:
        """The agent on ``node`` reports its assignment."""

    def store_up(self, node: str, generation: int, host: str, port: int) -> list[Action]:
        """The node of rank 0 serves the round's store."""

    def drained(self, node: str, generation: int, now: float, number: int = 0) -> list[Action]:
        """The drain asked for is served, or there is nothing to save."""

    def released(self, node: str, now: float) -> list[Action]:
        """No process of the job is left on ``node``."""

    def gone(self, node: str, now: float) -> list[Action]:
        """The node is lost."""

    def unreachable(self, node: str) -> None:
        """The agent on ``node`` cannot be reached: failures of its peers may be of its loss."""

    def reachable(self, node: str) -> None:
        """It is back."""

    def occupied(self, node: str) -> None:
        """Another job is on its way out of ``node``, however long it takes; the launcher is started
        when it is gone.
        """

    def doubt(self, node: str, over: bool) -> list[Action]:
        """Workers failed there, and it may be the node's fault; ``over``: it was not."""

    def give_up(self) -> list[Action]:
        """The workers of the round live, and make no step: the next plan starts them again, and
        waits for nothing that they would have to say.
        """

    def tick(self, now: float) -> list[Action]:
        """Carry on where a time limit has passed."""

    def postpone(self, by_s: float) -> None:
        """Nobody could be heard for so long: every time limit that runs ends later."""

    def next_wakeup(self) -> float | None:
        """When :meth:`tick` is due."""


class RoundPolicy(Protocol):
    """The steps of a rescale in which the modes differ.

    :class:`malletrain.rounds.restart.JobRounds` has those of restart mode.
    """

    def ready(self, node: str) -> bool:
        """Whether ``node`` can join a round."""

    def survivors(self) -> tuple[str, ...]:
        """The members that go on in the next round, in rank order; joiners follow them."""

    def keeps_round(self, now: float, within_s: float | None) -> bool:
        """Whether the round that is being formed is completed before a new target is pursued.

        Args:
            now: seconds on the daemon's clock.
            within_s: when a member leaves, seconds from now; None if none does.
        """

    def broken(self) -> list[str]:
        """Members whose workers failed."""

    def drain(self, now: float) -> list[Action]:
        """Save what the next round would lose."""

    def form(self, now: float) -> list[Action]:
        """Form the next round of all nodes that are ready."""

    def release(self, nodes: Iterable[str]) -> list[Action]:
        """Release ``nodes`` from the job."""
