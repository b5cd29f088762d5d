"""The status of a replica, which its front returns at ``/replica``. Pure."""

from __future__ import annotations

import msgspec

ENGINE_ENDED = "engine_ended"
"""Code of the error: the engine behind a front ended by itself."""
ENGINE_LOADS = "loading"
"""Code of the error: the engine behind a front is not ready."""


class ReplicaStatus(msgspec.Struct, kw_only=True):
    """The status of a replica."""

    state: str
    """A value of :class:`llmserve.states.ReplicaState`."""
    model: str = ""
    slots: int = 1
    """Maximum number of concurrent requests."""
    kv_tokens: int = 1
    """Maximum number of tokens of all concurrent requests together."""
    token_s: float = 0.0
    """Seconds for each token of one answer while all slots are in use; 0: not known."""
    ends_in_s: float | None = None
    """Seconds until its node is taken; None: no end is known."""
    load_s: float | None = None
    """Seconds that loading took; None: it has not loaded."""
    tokens_per_s: dict[int, float] = {}
    """Number of concurrent requests → tokens per second of all of them; empty: not measured."""
    sentence: str = ""
    """Why its engine ended, with the engine's last lines; empty: it has not ended."""
