"""Requests that are too long: for the operator's limit, or for the replicas. Pure.

Requests of clients wait for a larger replica for a limited time (:class:`OversizeRequests`). The
lines of a batch are submitted after all other lines (:class:`BatchQueue`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from llmserve.generation import GenerationRequest, RequestRefusal

LARGER_REPLICA_S = 30.0
"""Time for which a request that is larger than all replicas so far waits while none is loading,
seconds.
"""
RETURNING_REPLICA_S = 600.0
"""Time for which a request that is larger than all ready replicas waits while one is loading, or if
an earlier replica was large enough, seconds.
"""

Line = TypeVar("Line", bound=Hashable)


def too_long(prompt_tokens: int, answer_tokens: int, limit: int) -> RequestRefusal:
    """Return the refusal of a request that is too long.

    Args:
        prompt_tokens: number of tokens of the prompt.
        answer_tokens: maximum number of tokens of the answer, of all choices together.
        limit: maximum number of tokens of both together.
    """
    return RequestRefusal(
        "context_length_exceeded",
        f"The prompt has {prompt_tokens} tokens and the answer up to {answer_tokens}; the maximum "
        f"of both together is {limit}. Shorten the prompt or lower max_tokens.",
    )


class OversizeRequests:
    """Requests that are larger than every ready replica. Sizes are tokens of prompt and answer
    together. ``ready_tokens`` is the size of the largest ready replica; 0 without one.

    Args:
        limit: maximum size whatever replicas have room for; None: no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self.largest_tokens = 0
        """Size of the largest replica so far, tokens; 0: none has been ready."""
        self._refused_tokens: int | None = None
        """Size of the smallest request that has waited in vain; None: there is none, or a replica
        with room for it has become ready since.
        """
        self._since: dict[str, float] = {}
        """Request → time at which it was first seen waiting beside ready replicas."""

    def add_replica(self, tokens: int, *, is_first: bool) -> None:
        """Record that a replica is ready.

        Args:
            tokens: its size.
            is_first: whether no other is ready. The requests waited for any replica before, and
                begin to wait for a larger one.
        """
        if is_first:
            self._since.clear()
        self.largest_tokens = max(self.largest_tokens, tokens)
        if self._refused_tokens is not None and self._refused_tokens <= tokens:
            self._refused_tokens = None

    def refusal(self, request: GenerationRequest, ready_tokens: int) -> RequestRefusal | None:
        """Return the refusal of a request that is over the limit, or is at least as large as one
        that has waited in vain; else None.
        """
        if self._limit is not None and request.tokens > self._limit:
            return _refusal(request, self._limit)
        is_known = self._refused_tokens is not None and request.tokens >= self._refused_tokens
        if not is_known or not 0 < ready_tokens < request.tokens:
            return None
        return _refusal(request, ready_tokens)

    def wait(
        self, request: GenerationRequest, ready_tokens: int, now: float, *, is_loading: bool
    ) -> RequestRefusal | None:
        """Record that a request waits.

        Args:
            request: a chosen request that is on no replica.
            ready_tokens: see the class.
            now: the time, seconds; it does not decrease.
            is_loading: whether a replica is loading.

        Returns:
            Its refusal if it has waited long enough for a larger replica.
        """
        if not 0 < ready_tokens < request.tokens:
            self.forget(request.name)
            return None
        waited_s = now - self._since.setdefault(request.name, now)
        may_come = is_loading or request.tokens <= self.largest_tokens
        if waited_s >= (RETURNING_REPLICA_S if may_come else LARGER_REPLICA_S):
            self._refused_tokens = min(request.tokens, self._refused_tokens or request.tokens)
        return self.refusal(request, ready_tokens)

    def forget(self, request: str) -> None:
        """Forget a request that does not wait any more."""
        self._since.pop(request, None)


def _refusal(request: GenerationRequest, limit: int) -> RequestRefusal:
    prompt_tokens = len(request.prompt)
    return too_long(prompt_tokens, request.tokens - prompt_tokens, limit)


class BatchQueue(Generic[Line]):
    """The lines of a batch that are not submitted yet. A line that is larger than all replicas so
    far moves behind the others, until a larger replica may exist.

    Args:
        lines: lines in the order of submission.
    """

    def __init__(self, lines: Iterable[Line]) -> None:
        self._lines = deque(lines)
        self._deferred: set[Line] = set()
        """Lines that were moved behind the others and are still queued."""

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines)

    def take(self) -> Line:
        """Remove the next line and return it. Raises IndexError if there is none."""
        return self._lines.popleft()

    def defer(self, line: Line, tokens: int, largest_tokens: int) -> bool:
        """Move a line behind the others if it is larger than all replicas so far. This happens once
        per line; the second time it is to be submitted.

        Args:
            line: a result of :meth:`take`.
            tokens: number of its prompt and answer together.
            largest_tokens: size of the largest replica so far; 0: none has been ready.

        Returns:
            Whether it was moved.
        """
        if line in self._deferred:
            self._deferred.remove(line)
            return False
        if not 0 < largest_tokens < tokens:
            return False
        self._deferred.add(line)
        self._lines.append(line)
        return True
