"""The records of the clients, and their scores. Pure.

A client that was averaged at least once is *experienced*: its loss and its speed are known. The
others are *novices*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ClientRecord:
    """One client."""

    client: int
    """Its number, from 0."""
    samples: int
    """Number of its training samples."""
    rounds: int = 0
    """Number of rounds in which it was averaged."""
    loss: float = 0.0
    """Mean loss of its samples under the model that it received last."""
    samples_per_s: float = 0.0
    """Its speed in its last round, samples/s."""
    last_round: int = 0
    """The last round in which it was averaged; 0: none."""

    @property
    def experienced(self) -> bool:
        """Whether its loss and its speed are known."""
        return self.rounds > 0


@dataclass(frozen=True)
class ClientResult:
    """What the training of one client in one round reports."""

    client: int
    samples: int
    """Number of its training samples: its weight in the average."""
    loss: float
    """Mean loss of its samples under the model that it received."""
    seconds: float
    """Duration of the training, reads included, seconds."""


@dataclass(frozen=True)
class ClientFailure:
    """A training of one client in one round that raised an exception."""

    client: int
    reason: str
    """What went wrong, in one line."""


def after_round(record: ClientRecord, result: ClientResult, number: int) -> ClientRecord:
    """Return the record of a client that was averaged in round ``number``."""
    speed = result.samples / result.seconds if result.seconds > 0 else record.samples_per_s
    return replace(
        record,
        samples=result.samples,
        rounds=record.rounds + 1,
        loss=result.loss,
        samples_per_s=speed,
        last_round=number,
    )


def scaled(values: Sequence[float]) -> list[float]:
    """Return ``values`` scaled to 0 … 1 by their minimum and maximum. Equal values, such as those
    of a first round, become 0.5 each.
    """
    if not values:
        return []
    lowest, highest = min(values), max(values)
    if highest == lowest:
        return [0.5] * len(values)
    return [(value - lowest) / (highest - lowest) for value in values]


def scores(clients: Sequence[ClientRecord], loss_weight: float = 0.7) -> list[float]:
    """Return the score of each experienced client, 0 to 1: a weighted mean of its loss and its
    speed, each scaled over these clients. A client with a high loss has more to contribute; a fast
    client does not delay the round.

    Args:
        clients: experienced clients.
        loss_weight: weight of the loss, 0 to 1; the rest is that of the speed.
    """
    losses = scaled([client.loss for client in clients])
    speeds = scaled([client.samples_per_s for client in clients])
    return [
        loss_weight * loss + (1.0 - loss_weight) * speed
        for loss, speed in zip(losses, speeds, strict=True)
    ]
