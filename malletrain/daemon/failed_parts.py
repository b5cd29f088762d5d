"""What is left of parts of a daemon that have failed, for those that take their place. It refers to
none of them, so that they are garbage before the next ones begin.
"""

from __future__ import annotations

from dataclasses import dataclass

from malletrain.daemon.clock_set import ClockWasSet
from malletrain.daemon.compose import Service
from malletrain.daemon.mishaps import cause_of
from malletrain.daemon.switchboard import MessageFailed
from malletrain.protocol.event_kinds import EventKind


@dataclass(frozen=True)
class FailedParts:
    """What the next parts of a daemon are told of those that have failed."""

    kind: EventKind
    sentence: str
    """What happened."""
    peers: tuple[bytes, ...]
    """The agents that they knew."""

    @classmethod
    def of(cls, failure: BaseException, service: Service) -> FailedParts:
        """Of those that this ended."""
        told = isinstance(failure, MessageFailed | ClockWasSet)
        set_ = isinstance(failure, ClockWasSet)
        return cls(
            EventKind.CLOCK_SET if set_ else EventKind.MESSAGE_FAILED,
            str(failure) if told else f"The daemon failed: {cause_of(failure)}",
            tuple(agent.peer for agent in service.core.agents),
        )
