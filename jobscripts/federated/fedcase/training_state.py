"""The state of a federated training after a round. Pure; :mod:`fedcase.state` is its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from fedcase.clients import ClientRecord


@dataclass(frozen=True)
class RoundRecord:
    """A round that counts."""

    number: int
    clients: tuple[int, ...]
    """The clients that were averaged."""
    share: float
    """The share of experienced clients that the ratio rule chose."""
    loss: float
    """Mean loss of the clients under the model before the round."""
    seconds: float
    drawn_again: int = 0
    """How many times a client was drawn again because its node was lost."""
    measures: dict[str, float] = field(default_factory=dict)
    """The task's evaluation of the model after the round."""


@dataclass
class TrainingState:
    """Everything that a server needs to continue after its last round."""

    arrays: Mapping[str, Any]
    """The model, by name."""
    records: dict[int, ClientRecord]
    rule: dict[str, Any] = field(default_factory=dict)
    """State of the ratio rule."""
    random: Random = field(default_factory=Random)
    rounds: list[RoundRecord] = field(default_factory=list)

    @property
    def round(self) -> int:
        """Number of the last round that counts; 0: none."""
        return self.rounds[-1].number if self.rounds else 0


def new_state(arrays: Mapping[str, Any], samples: Sequence[int], random: Any) -> TrainingState:
    """Return the state before the first round.

    Args:
        arrays: the model to begin with.
        samples: number of samples of each client, in the order of their numbers.
        random: generator of the draws.
    """
    records = {client: ClientRecord(client, count) for client, count in enumerate(samples)}
    return TrainingState(arrays, records, {}, random, [])
