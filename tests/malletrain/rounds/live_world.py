"""A live job whose agents say what the test has them say, and what its rounds do about it."""

from __future__ import annotations

from malletrain.protocol.messages import Assignment, Failure
from malletrain.protocol.phases import AssignmentPhase
from malletrain.rounds.interface import SaveRound, SendAbort
from malletrain.rounds.live import LiveRounds

KILLED, RAISED, LOST_PEER, GAVE_UP = (
    Failure(0, -9, 1.0),
    Failure(0, 1, 1.0, "ValueError: oops"),
    Failure(0, 1, 1.0, "RuntimeError: [pair.cc] Connection closed by peer"),
    Failure(0, 75, 1.0),
)


class Live:
    """A live job whose agents say what the test has them say."""

    def __init__(self, *nodes: str, min_nodes: int = 1) -> None:
        self.rounds = LiveRounds(min_nodes=min_nodes)
        self.now = 10.0
        self.rounds.move(nodes, self.now)
        for node in nodes:
            self.says(node, "ready", 0)
        self.run()

    def says(
        self, node: str, phase: str, generation: int | None = None, *failures: Failure
    ) -> list:
        number = self.rounds.generation if generation is None else generation
        return self.rounds.phase(
            node, Assignment("job", AssignmentPhase(phase), number, failures), self.now
        )

    def run(self) -> list:
        """Let all members of the newest round begin to run in it."""
        actions = self.rounds.store_up(self.rounds.members[0], self.rounds.generation, "host", 1)
        number = self.rounds.generation
        for node in self.rounds.members:
            actions += self.says(node, "running", number)
        return actions

    def fails(self, node: str, failure: Failure = KILLED) -> list:
        return self.says(node, "failed", self.rounds.holdings.phases[node].generation, failure)


def of(kind: type, actions: list) -> list:
    return [a for a in actions if isinstance(a, kind)]


def aborts(actions: list) -> set[tuple[str, int]]:
    return {(a.node, a.generation) for a in of(SendAbort, actions)}


def rounds(actions: list) -> list[tuple[str, ...]]:
    return [a.members for a in of(SaveRound, actions)]
