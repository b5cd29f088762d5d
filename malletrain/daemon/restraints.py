"""Stores which nodes operators have excluded from leasing and until when, so that a restart of the
daemon keeps it.

:mod:`malletrain.core.restraint` decides what may be leased.
"""

from __future__ import annotations

import msgspec

from malletrain.core.restraint import EVERY_NODE, Restraint
from malletrain.daemon.daemon_state import DaemonState
from malletrain.protocol.event_kinds import EventKind


class Restraints:
    """The current restraint of one daemon. Change it only within transactions."""

    def __init__(self, state: DaemonState) -> None:
        self._state = state
        text = state.store.restraint()
        self.now = msgspec.json.decode(text, type=Restraint) if text else Restraint()

    def put(self, restraint: Restraint) -> None:
        """Store and apply a new restraint."""
        self._state.store.put_restraint(msgspec.json.encode(restraint).decode())
        self.now = restraint

    def expire(self, now: float) -> None:
        """Remove the drains whose time is over."""
        if expired := self.now.over(now):
            self.put(self.now.resuming(expired))
            for node in expired:
                self._state.audit.record(
                    EventKind.NODE_RESUMED,
                    "Its drain was until now.",
                    node="" if node == EVERY_NODE else node,
                )
