"""Requests that are too long: for the operator's limit, or for the replicas. Pure."""

from __future__ import annotations

from llmserve.generation import GenerationRequest, RequestRefusal

LARGER_REPLICA_S = 30.0
"""Seconds that a request waits which no replica so far could hold, while none is loading."""
RETURNING_REPLICA_S = 600.0
"""Seconds that a request waits which no ready replica could hold, while one is loading, or if an
earlier one could."""


class OversizeRequests:
    """Requests that are larger than every ready replica. Sizes are tokens of prompt and answer
    together; ``ready_tokens`` is what the largest ready replica holds, 0 without one.

    Args:
        limit: maximum size whatever replicas hold; None: no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self.largest_tokens = 0
        """Maximum number of tokens that a replica so far holds; 0: none has been ready."""
        self._refused_tokens: int | None = None
        """Size of the smallest request that has waited in vain; None: none has, or a replica that
        could hold it has come since."""
        self._since: dict[str, float] = {}
        """Request → when it was first seen waiting beside ready replicas."""

    def add_replica(self, tokens: int, *, is_first: bool) -> None:
        """A replica is ready.

        Args:
            tokens: number that it holds.
            is_first: whether no other is ready. Requests waited for any replica before, and begin
                to wait for a larger one.
        """
        if is_first:
            self._since.clear()
        self.largest_tokens = max(self.largest_tokens, tokens)
        if self._refused_tokens is not None and self._refused_tokens <= tokens:
            self._refused_tokens = None

    def refusal(self, request: GenerationRequest, ready_tokens: int) -> RequestRefusal | None:
        """Returns the refusal of a request that is over the limit, or is at least as large as one
        that has waited in vain; else None.
        """
        if self._limit is not None and request.tokens > self._limit:
            return too_long(request, self._limit)
        is_known = self._refused_tokens is not None and request.tokens >= self._refused_tokens
        if not is_known or not 0 < ready_tokens < request.tokens:
            return None
        return too_long(request, ready_tokens)

    def wait(
        self, request: GenerationRequest, ready_tokens: int, now: float, *, is_loading: bool
    ) -> RequestRefusal | None:
        """A request waits.

        Args:
            request: that has been chosen, and is on no replica.
            ready_tokens: as of the class.
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
        """A request does not wait any more."""
        self._since.pop(request, None)


def too_long(request: GenerationRequest, limit: int) -> RequestRefusal:
    """Returns the refusal of a request that is larger than ``limit`` tokens."""
    answer = request.tokens - len(request.prompt)
    return RequestRefusal(
        "context_length_exceeded",
        f"The prompt has {len(request.prompt)} tokens and the answer up to {answer}; the maximum "
        f"of both together is {limit}. Shorten the prompt or lower max_tokens.",
    )
