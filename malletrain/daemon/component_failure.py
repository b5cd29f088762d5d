"""The failure that is passed to the components that replace failed ones. It refers to no object of
the failed ones, so their memory is freed before the new ones start.
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
    sentence: str
    """What happened."""
    peers: tuple[bytes, ...]
    """Connections of the agents that they knew."""

    @classmethod
    def of(cls, failure: BaseException, service: Service) -> ComponentFailure:
        """The failure that ended the components of ``service``."""
        explained = isinstance(failure, MessageFailed | ClockWasSet)
        clock_set = isinstance(failure, ClockWasSet)
        return cls(
            EventKind.CLOCK_SET if clock_set else EventKind.MESSAGE_FAILED,
            str(failure) if explained else f"The daemon failed: {cause_of(failure)}",
            tuple(agent.peer for agent in service.core.agents),
        )
