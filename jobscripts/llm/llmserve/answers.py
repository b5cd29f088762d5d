"""Answers for the clients of a live dispatcher: parts while they are generated, and a result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from llmserve.generation import FinishReason, RequestRefusal
from llmserve.states import RequestState
from malletrain.waits import time_limit


@dataclass(frozen=True)
class AnswerPart:
    """Text and ids that follow those of the previous part. Either may be empty: text that could be
    the beginning of a stop string is sent in a later part than its ids.
    """

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class AnswerResult:
    """The end of a request."""

    state: RequestState
    """One of ``llmserve.states.ENDED``."""
    text: str = ""
    """The whole text without the stop string. It includes the text of ids from an earlier run."""
    ids: tuple[int, ...] = ()
    """All generated ids."""
    prompt_tokens: int = 0
    reason: FinishReason | None = None
    """Why the answer ended; None if there is none."""
    sentence: str = ""
    """What went wrong; empty if nothing did."""
    refusal: RequestRefusal | None = None
    """The exceeded limit; None if there is none. HTTP status 429 if it has ``retry_after_s``, else
    400.
    """
    engine_status: int = 0
    """HTTP status of an engine's final refusal; 0: no engine refused it."""
    body: dict[str, Any] | None = None
    """The unchanged answer of the engine, only for :meth:`LiveDispatcher.submit_body`."""
    attempts: int = 0
    """Number of attempts that were posted to replicas: 1 without moves and losses."""
    submitted_at: float = 0.0
    """Time of the submission, seconds on the clock of the dispatcher."""
    first_token_at: float | None = None
    """Time of the first token on that clock, seconds; None: there was no token."""
    ended_at: float = 0.0
    """Time of the end on that clock, seconds."""


class AnswerStream:
    """The answer of one request: iterate over its parts, or wait for its :meth:`result`, or both.

    Only a request with ``stream=True`` has parts. Nothing is lost if nobody iterates.

    Args:
        request: its name.
        cancel: cancels the request.
    """

    def __init__(self, request: str, cancel: Callable[[], None]) -> None:
        self.request = request
        self._cancel = cancel
        self._parts: asyncio.Queue[AnswerPart | None] = asyncio.Queue()
        self._listeners: list[Callable[[AnswerResult], None]] = []
        self._result: asyncio.Future[AnswerResult] = asyncio.get_running_loop().create_future()

    async def __aiter__(self) -> AsyncIterator[AnswerPart]:
        """Yield the parts as they come; ends when the request has ended."""
        while (part := await self.next_part()) is not None:
            yield part

    async def next_part(self, timeout_s: float | None = None) -> AnswerPart | None:
        """Return the next part; None once the request has ended.

        Raises:
            asyncio.TimeoutError: there was none in time. No part is lost: call it again.
        """
        async with time_limit(timeout_s):
            part = await self._parts.get()
        if part is None:
            self._parts.put_nowait(None)
        return part

    async def result(self) -> AnswerResult:
        """Return the result when the request has ended. Cancelling the task that waits for it does
        not cancel the request.
        """
        return await asyncio.shield(self._result)

    def on_end(self, listener: Callable[[AnswerResult], None]) -> None:
        """Call ``listener`` with the result when the request has ended; at once if it has."""
        if self._result.done():
            listener(self._result.result())
        else:
            self._listeners.append(listener)

    @property
    def has_ended(self) -> bool:
        """Whether the request has ended."""
        return self._result.done()

    def cancel(self) -> None:
        """Cancel the request. Its result is then that of a cancelled request. No effect if it has
        ended.
        """
        self._cancel()

    # --- for the dispatcher ---

    def add(self, part: AnswerPart) -> None:
        """Add a part."""
        self._parts.put_nowait(part)

    def end(self, result: AnswerResult) -> None:
        """Record the end of the request."""
        self._result.set_result(result)
        self._parts.put_nowait(None)
        for listener in self._listeners:
            listener(result)
