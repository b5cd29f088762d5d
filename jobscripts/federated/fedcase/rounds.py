"""The states of a client in a round, as a table of transitions, and a round. Pure.

A client is drawn, trains on a node and is averaged. If its node is lost or its training fails, it
is drawn again, for another node. Clients are sent to a node in an *attempt*, and the result of an
attempt counts as a whole or not at all; if the attempt was given up before, its result is refused.
So no client is averaged twice or in part. A result may name clients whose training failed; the
other clients of the attempt are averaged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum


class ClientState(str, Enum):
    """State of a client in a round."""

    DRAWN = "drawn"
    """It waits for a node."""
    TRAINING = "training"
    """It was sent to a node."""
    AVERAGED = "averaged"
    """Its result is part of the round."""
    DROPPED = "dropped"
    """Its training failed the maximum number of times; the round is completed without it."""

    __str__ = str.__str__


class ClientEvent(Enum):
    """What happens to a client in a round."""

    SENT = "it is sent to a node"
    RESULT = "the node's result has arrived whole"
    NODE_LOST = "the node is lost"
    FAILED = "its training fails and may be tried again"
    FAILED_FOR_GOOD = "its training has failed too often"


TRANSITIONS: dict[tuple[ClientState, ClientEvent], ClientState] = {
    (ClientState.DRAWN, ClientEvent.SENT): ClientState.TRAINING,
    (ClientState.TRAINING, ClientEvent.RESULT): ClientState.AVERAGED,
    (ClientState.TRAINING, ClientEvent.NODE_LOST): ClientState.DRAWN,
    (ClientState.TRAINING, ClientEvent.FAILED): ClientState.DRAWN,
    (ClientState.TRAINING, ClientEvent.FAILED_FOR_GOOD): ClientState.DROPPED,
}
"""(state, event) → next state. Any other event is an error. A lost node is no fault of its clients,
which may therefore be drawn again any number of times."""


class RoundError(RuntimeError):
    """An event that cannot happen in this state."""


@dataclass(frozen=True)
class NodeAttempt:
    """Clients that were sent to a node together; they are averaged together or drawn again."""

    number: int
    node: int
    clients: tuple[int, ...]


@dataclass
class FederatedRound:
    """One round. ``number`` counts from 1; ``most_failures``: failed trainings of a client after
    which it is dropped.
    """

    number: int
    clients: Sequence[int]
    most_failures: int = 3
    states: dict[int, ClientState] = field(init=False)
    _attempts: dict[int, NodeAttempt] = field(init=False, default_factory=dict)
    _next: int = field(init=False, default=1)
    _failures: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.states = dict.fromkeys(self.clients, ClientState.DRAWN)

    @property
    def complete(self) -> bool:
        """Whether every client is averaged or dropped."""
        return all(
            state in (ClientState.AVERAGED, ClientState.DROPPED) for state in self.states.values()
        )

    @property
    def open_attempts(self) -> tuple[NodeAttempt, ...]:
        """The attempts that have no result yet."""
        return tuple(self._attempts.values())

    def of(self, state: ClientState) -> list[int]:
        """Return the clients in ``state``."""
        return [client for client, its in self.states.items() if its is state]

    def send(self, node: int, clients: Iterable[int]) -> NodeAttempt:
        """Note that drawn ``clients`` were sent to ``node``. Return the attempt.

        Raises:
            RoundError: one of them is not drawn.
        """
        attempt = NodeAttempt(self._next, node, tuple(clients))
        self._move(attempt.clients, ClientEvent.SENT)
        self._next += 1
        self._attempts[attempt.number] = attempt
        return attempt

    def result(self, number: int, failed: Collection[int] = ()) -> bool:
        """Note that the result of an attempt has arrived whole. Return whether it counts; if the
        attempt was given up, it does not. ``failed``: the clients of the attempt whose training
        failed.
        """
        attempt = self._attempts.pop(number, None)
        if attempt is None:
            return False
        self._move([c for c in attempt.clients if c not in failed], ClientEvent.RESULT)
        self._fail([c for c in attempt.clients if c in failed])
        return True

    def fail(self, number: int) -> list[int]:
        """Note that an attempt ended with an error. Return the clients that are drawn again."""
        attempt = self._attempts.pop(number, None)
        if attempt is None:
            return []
        self._fail(attempt.clients)
        return [client for client in attempt.clients if self.states[client] is ClientState.DRAWN]

    def failures(self, client: int) -> int:
        """Return how often the training of a client failed in this round."""
        return self._failures.get(client, 0)

    def lose(self, node: int) -> list[int]:
        """Note that a node was lost. Return the clients that are drawn again: those that were
        training on it. Results that the node reported before count.
        """
        again: list[int] = []
        for attempt in [a for a in self._attempts.values() if a.node == node]:
            again += self.lose_attempt(attempt.number)
        return again

    def lose_attempt(self, number: int) -> list[int]:
        """Note that the result of an attempt will not come. Return the clients that are drawn
        again.
        """
        attempt = self._attempts.pop(number, None)
        if attempt is None:
            return []
        self._move(attempt.clients, ClientEvent.NODE_LOST)
        return list(attempt.clients)

    def _fail(self, clients: Iterable[int]) -> None:
        for client in clients:
            failures = self._failures[client] = self.failures(client) + 1
            for_good = failures >= self.most_failures
            self._move([client], ClientEvent.FAILED_FOR_GOOD if for_good else ClientEvent.FAILED)

    def _move(self, clients: Iterable[int], event: ClientEvent) -> None:
        after: dict[int, ClientState] = {}
        for client in clients:
            state = self.states.get(client)
            if state is None or (state, event) not in TRANSITIONS:
                raise RoundError(
                    f"Client {client} is {state or 'not'} in round {self.number}; "
                    f'"{event.value}" cannot happen to it.'
                )
            after[client] = TRANSITIONS[state, event]
        self.states.update(after)
