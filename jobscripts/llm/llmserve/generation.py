"""What flows between clients, the dispatcher and replicas: requests and commands. Pure.

Tokens are ids. A front that has text tokenises it before it submits, and posts ids to the engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from llmserve.states import RequestState


class FinishReason(str, Enum):
    """Why the generation of an answer ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"

    __str__ = str.__str__


@dataclass(frozen=True)
class GenerationRequest:
    """One answer that a client wants."""

    name: str
    """Unique among the requests that have not ended."""
    user: str
    prompt: Sequence[int]
    """Ids of the prompt, at least one."""
    max_tokens: int
    """Maximum number of ids to generate, at least 1."""
    application: str = ""
    """One that the operator has declared; others count as none."""
    interaction: str = ""
    """Name of the interaction of several calls that it belongs to; empty: none."""
    ends_interaction: bool = False
    """Whether it is the last call of its interaction."""
    stream: bool = False
    """Whether the client reads tokens as they come."""
    continuable: bool = True
    """Whether an answer that was cut can be continued from its ids. False with logprobs, several
    choices, tool calls or grammars: they start again."""

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise ValueError(f"Request {self.name} has an empty prompt; it needs one id or more.")
        if self.max_tokens < 1:
            raise ValueError(
                f"Request {self.name} has max_tokens {self.max_tokens}; it must be at least 1."
            )

    @property
    def tokens(self) -> int:
        """Maximum number of tokens that it has in the memory of a replica."""
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True)
class RequestRefusal:
    """Why a request is not accepted."""

    limit: str
    """Name of the limit, such as ``requests_per_minute``."""
    sentence: str
    """For the person who reads it."""
    retry_after_s: float | None = None
    """Seconds after which it would be accepted; None: never."""


@dataclass(frozen=True)
class PostAttempt:
    """Post to a replica: the prompt and what was generated before."""

    request: GenerationRequest
    attempt: int
    """Unique number; tokens and ends are reported with it."""
    replica: str
    ids: Sequence[int]
    """The prompt, then the ids that are kept."""
    max_tokens: int
    """Ids that are still to be generated."""


@dataclass(frozen=True)
class StopAttempt:
    """Stop an attempt on a replica, and report when it is stopped."""

    request: str
    attempt: int
    replica: str


@dataclass(frozen=True)
class DeliverTokens:
    """Tokens for the client of a stream, each once and in order."""

    request: str
    first: int
    """Index of the first one in the answer."""
    ids: tuple[int, ...]


@dataclass(frozen=True)
class EndRequest:
    """The end of a request, whatever its state was."""

    request: str
    state: RequestState
    ids: tuple[int, ...] = ()
    """The generated ids."""
    reason: FinishReason | None = None
    """Why the answer ended; None if there is none."""
    sentence: str = ""
    """What went wrong; empty if nothing did."""
    refusal: RequestRefusal | None = None


Command = PostAttempt | StopAttempt | DeliverTokens | EndRequest
"""What the dispatcher wants to be done, in this order."""
