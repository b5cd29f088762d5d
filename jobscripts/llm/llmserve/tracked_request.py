"""A request that has not ended, as the dispatcher tracks it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmserve.generation import GenerationRequest
from llmserve.states import REQUEST_TRANSITIONS, RequestEvent, RequestState

MAX_FAILURES = 3
"""Number of attempts that end with the engine of their replica before a request fails."""


@dataclass(eq=False)
class TrackedRequest:
    """A request that has not ended."""

    request: GenerationRequest
    generated: list[int] = field(default_factory=list)
    complete: int = 0
    """Number of generated ids up to which the text is complete."""
    delivered: int = 0
    """Number of ids that were delivered to a stream."""
    charged: int = 0
    """Number of ids that the policy knows of."""
    state: RequestState = RequestState.QUEUED
    attempt: int = 0
    """Number of its newest attempt; 0: it has not been posted."""
    replica: str = ""
    """Replica of its attempt; empty: it is on none."""
    failures: int = 0
    """Number of attempts that ended with the engine of their replica."""
    was_taken: bool = False
    """Whether it has left the queue of the policy: it was posted, or waits for a larger replica."""
    blocks: list[int] = field(default_factory=list)
    """Prefix blocks of the prompt."""

    def change(self, event: RequestEvent) -> None:
        """Change to the next state. Raises KeyError for an event that is invalid in this state."""
        self.state = REQUEST_TRANSITIONS[self.state, event]

    @property
    def missing(self) -> int:
        """Number of ids that are still to be generated for each choice."""
        return self.request.max_tokens - len(self.generated)

    @property
    def runs_alone(self) -> bool:
        """Whether its next attempt is the last and runs alone, so that no other fails with it."""
        return self.failures >= MAX_FAILURES - 1
