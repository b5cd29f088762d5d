"""The counts and the view of replicas that a live dispatcher reports. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmserve.states import ReplicaState, RequestState


@dataclass
class LiveCounts:
    """Counts since the start, and the present load."""

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
    """Number of tokens in the prompts of accepted requests."""
    generated_tokens: int = 0
    """Number of ids that engines reported, including ids that were generated again."""
    attempts: int = 0
    """Number of attempts that were posted."""
    moves: int = 0
    """Number of attempts that were stopped because their replica leaves."""
    losses: int = 0
    """Number of attempts that were lost with their replica."""
    repeated_tokens: int = 0
    """Number of reported ids that had to be generated again."""
    queued: int = 0
    """Number of requests that wait now."""
    running: int = 0
    """Number of attempts on replicas now."""


@dataclass
class ReplicaView:
    """A replica, for users and metrics."""

    name: str
    address: str
    state: ReplicaState
    running: int = 0
    """Number of attempts on it now."""
    slots: int = 0
    """Maximum number of requests at once; 0: not known yet."""
    kv_tokens: int = 0
    """Maximum number of tokens of all requests."""
    token_s: float = 0.0
    """Seconds for each token of one answer while all slots are in use; 0: not known."""
    load_s: float | None = None
    """Seconds that loading took; None: not known."""
    sentence: str = ""
    """Its last error; empty: none is known."""
