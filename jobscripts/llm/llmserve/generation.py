"""The requests of clients and the commands of the dispatcher. Pure.

Tokens are ids: text is tokenized before it is submitted, and engines get ids.
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
    """A client's request for one answer."""

    name: str
    """Unique among the requests that have not ended."""
    user: str
    prompt: Sequence[int]
    """Ids of the prompt, at least one."""
    max_tokens: int
    """Maximum number of ids to generate for each choice, at least 1."""
    application: str = ""
    """Application that the operator has declared; empty: none."""
    interaction: str = ""
    """Name of the interaction of several requests that it belongs to; empty: none."""
    ends_interaction: bool = False
    """Whether it is the last call of its interaction."""
    stream: bool = False
    """Whether the client reads tokens as they come."""
    continuable: bool = True
    """Whether an interrupted answer can be continued from its ids. False with logprobs, several
    choices, tool calls, grammars, ``frequency_penalty``, ``presence_penalty`` or ``bad_words``:
    such an answer starts again."""
    choices: int = 1
    """Number of answers that the engine generates at once."""

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise ValueError(f"Request {self.name} has an empty prompt; it needs one id or more.")
        if self.max_tokens < 1:
            raise ValueError(
                f"Request {self.name} has max_tokens {self.max_tokens}; it must be at least 1."
            )

    @property
    def tokens(self) -> int:
        """Maximum number of tokens that it needs in the memory of a replica."""
        return len(self.prompt) + self.max_tokens * self.choices


@dataclass(frozen=True)
class RequestRefusal:
    """Reason for refusing a request."""

    limit: str
    """Name of the limit, such as ``requests_per_minute``."""
    sentence: str
    """The message for the user."""
    retry_after_s: float | None = None
    """Seconds after which the same request would be accepted; None: never."""


@dataclass(frozen=True)
class PostAttempt:
    """Post to a replica: the prompt and what was generated before."""

    request: GenerationRequest
    attempt: int
    """Unique number, with which tokens and the end are reported."""
    replica: str
    ids: Sequence[int]
    """The prompt, then the ids that were generated before."""
    max_tokens: int
    """Maximum number of further ids."""


@dataclass(frozen=True)
class StopAttempt:
    """Stop an attempt on a replica, and report that it has stopped."""

    request: str
    attempt: int
    replica: str


@dataclass(frozen=True)
class DeliverTokens:
    """Tokens for the client of a stream. Each token is delivered once and in order."""

    request: str
    first: int
    """Index of the first one in the answer."""
    ids: tuple[int, ...]


@dataclass(frozen=True)
class EndRequest:
    """The end of a request, successful or not."""

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
"""A command of the dispatcher. Commands are carried out in their order."""
