"""Describes a failure of the daemon's components for the components that replace them. The
description refers to no object of the failed ones, so their memory is freed before the new ones
start.
"""

from __future__ import annotations

from dataclasses import dataclass

from malletrain.daemon.clock_set import ClockWasSet
from malletrain.daemon.compose import Service
from malletrain.daemon.handler_failures import cause_of
from malletrain.daemon.message_router import MessageFailed
from malletrain.protocol.event_kinds import EventKind


@dataclass(frozen=True)
class ComponentFailure:
    """Why the daemon's components have failed, and which agents they knew."""

    kind: EventKind
    """Kind of the event that records the failure."""
    sentence: str
    """Description of the failure for users."""
    peers: tuple[bytes, ...]
    """Connections of the agents that they knew."""

    @classmethod
    def of(cls, failure: BaseException, service: Service) -> ComponentFailure:
        """Return the description of the failure that ended the components of ``service``."""
        has_sentence = isinstance(failure, MessageFailed | ClockWasSet)
        clock_set = isinstance(failure, ClockWasSet)
        return cls(
            EventKind.CLOCK_SET if clock_set else EventKind.MESSAGE_FAILED,
            str(failure) if has_sentence else f"The daemon failed: {cause_of(failure)}",
            tuple(agent.peer for agent in service.core.agents),
        )
