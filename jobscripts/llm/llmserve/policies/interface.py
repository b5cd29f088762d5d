"""The interface of scheduling policies: which requests are admitted, and which is next. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from llmserve.generation import GenerationRequest, RequestRefusal

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""Service of a token of the prompt and of the answer (Sheng et al., OSDI 2024, section 5.1)."""


@dataclass(frozen=True)
class Load:
    """Load of the replicas."""

    queued: int
    """Number of requests that wait."""
    slots: int
    """Number of requests that the ready replicas can hold at once."""


class SchedulingPolicy(Protocol):
    """The queue of the requests that have not been posted yet. Requests that move to another
    replica are not part of it: they were charged before, and are posted first.

    Times are seconds on the clock of the caller and do not decrease.
    """

    def admit(self, request: GenerationRequest, load: Load, now: float) -> RequestRefusal | None:
        """Return why a new request is refused; None if it may be queued."""

    def enqueue(self, request: GenerationRequest, now: float) -> None:
        """Queue a request that was admitted."""

    def head(self, now: float) -> GenerationRequest | None:
        """Return the request that is next; it stays queued. None if the queue is empty."""

    def take(self, request: GenerationRequest) -> None:
        """Remove the request that :meth:`head` returned from the queue: it is posted, or waits for
        a larger replica. Charge its prompt, so that the head follows the shares also while many
        requests wait for a larger replica.
        """

    def begin(self, request: GenerationRequest, now: float) -> None:
        """Record that the request, which has left the queue, is posted for the first time."""

    def withdraw(self, request: GenerationRequest) -> None:
        """Record that the request ends before it was posted. If it has left the queue, refund its
        charge; else remove it from the queue.
        """

    def generated(self, request: GenerationRequest, count: int) -> None:
        """Charge ``count`` further tokens of the answer. Tokens that are generated again after a
        loss are not charged.
        """

    def ended(self, request: GenerationRequest, generated: int, now: float) -> None:
        """Record that the request, which was posted, has ended with ``count`` tokens."""
