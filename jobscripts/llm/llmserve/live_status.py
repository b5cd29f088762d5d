"""What a live dispatcher shows of itself, for metrics and people. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmserve.states import ReplicaState, RequestState


@dataclass
class LiveCounts:
    """Numbers since the start, and the load now."""

    submitted: int = 0
    ended: dict[RequestState, int] = field(
        default_factory=lambda: dict.fromkeys(
            (
                RequestState.DONE,
                RequestState.CANCELLED,
                RequestState.REFUSED,
                RequestState.FAILED,
            ),
            0,
        )
    )
    """State of the end → number of requests."""
    prompt_tokens: int = 0
    """Of accepted requests."""
    generated_tokens: int = 0
    """Ids that engines reported, those that were generated again included."""
    attempts: int = 0
    """Attempts that were posted."""
    moves: int = 0
    """Attempts that were stopped because their replica leaves."""
    losses: int = 0
    """Attempts that were lost with their replica."""
    repeated_tokens: int = 0
    """Ids that were reported and had to be generated again."""
    queued: int = 0
    """Requests that wait now."""
    running: int = 0
    """Attempts on replicas now."""


@dataclass
class ReplicaView:
    """A replica, for people and metrics."""

    name: str
    address: str
    state: ReplicaState
    running: int = 0
    """Attempts on it now."""
    slots: int = 0
    """0: not known yet."""
    kv_tokens: int = 0
    token_s: float = 0.0
    load_s: float | None = None
    """Seconds that loading took; None: not known."""
    sentence: str = ""
    """What is wrong with it; empty: nothing is known to be."""
