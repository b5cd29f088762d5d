"""The live dispatcher's record of a replica: its connection, and its last report."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmserve.live_status import ReplicaView
from llmserve.replica_client import ReplicaClient
from llmserve.replica_status import ReplicaStatus
from llmserve.replicas import Capacity
from llmserve.states import ReplicaState

UNANSWERED_S = 60.0
"""Seconds for which a replica that has never answered is expected to load."""


@dataclass(eq=False)
class LiveReplica:
    """A replica of the dispatcher, until it is removed."""

    name: str
    client: ReplicaClient
    capacity: Capacity | None
    """Capacity given by the caller; None: the front reports it."""
    added_at: float = 0.0
    status: ReplicaStatus | None = None
    """The newest status."""
    answered_at: float = 0.0
    task: asyncio.Task[None] | None = None
    attempts: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    is_known: bool = False
    """Whether the dispatcher has it as a replica."""
    lost_at: float = -math.inf
    """Time of its last loss. Answers to earlier requests are ignored."""
    lasts_until: float | None = None
    """Time at which its node is expected to end; None: no forecast."""
    had_notice: bool = False
    """Whether its front has said that it drains."""
    sentence: str = ""

    async def ask(self, **options: float) -> ReplicaStatus:
        """Its last report, or that of its engine if there is no front."""
        capacity = self.capacity
        if capacity is None:
            return await self.client.status(**options)
        state = ReplicaState.LOADING
        if await self.client.is_healthy(**options):
            state = ReplicaState.READY
        return ReplicaStatus(state=state, **dataclasses.asdict(capacity))

    def may_hold_more(self, tokens: int, now: float) -> bool:
        """Return whether it may soon be ready, with room for more than ``tokens`` tokens."""
        if self.is_known:
            return False
        if self.capacity is not None:
            return self.capacity.kv_tokens > tokens
        if self.status is None:
            return now - self.added_at < UNANSWERED_S
        # a front restarts an engine that has failed
        return self.status.state in (ReplicaState.LOADING, ReplicaState.FAILED)

    def view(self, states: Mapping[str, ReplicaState]) -> ReplicaView:
        """Return the view of the replica for users and metrics.

        Args:
            states: state of each replica of the dispatcher.
        """
        status = self.status
        view = ReplicaView(
            self.name,
            self.client.address,
            states.get(self.name, ReplicaState.LOADING),
            len(self.attempts),
            sentence=self.sentence,
        )
        if status is not None:
            if not self.is_known:
                view.state = _state_outside(status.state)
            view.slots, view.kv_tokens = status.slots, status.kv_tokens
            view.token_s, view.load_s = status.token_s, status.load_s
        return view


def _state_outside(state: str) -> ReplicaState:
    """Return the state of a replica that gets no requests, from its last report."""
    if state in (ReplicaState.LOADING, ReplicaState.DRAINING, ReplicaState.FAILED):
        return ReplicaState(state)
    return ReplicaState.GONE  # it was ready, and cannot be reached
