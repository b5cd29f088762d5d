"""Stores which nodes operators have excluded from leasing and until when, so that a restart of the
daemon keeps it.

:mod:`malletrain.core.restraint` decides what may be leased.
"""

from __future__ import annotations

import msgspec

from malletrain.core.restraint import EVERY_NODE, Restraint
from malletrain.daemon.parts import Parts
from malletrain.protocol.event_kinds import EventKind


class Restraints:
    """The current restraint of one daemon. Change it only within transactions."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        text = parts.store.restraint()
        self.now = msgspec.json.decode(text, type=Restraint) if text else Restraint()

    def put(self, restraint: Restraint) -> None:
        """Store and apply a new restraint."""
        self._parts.store.put_restraint(msgspec.json.encode(restraint).decode())
        self.now = restraint

    def expire(self, now: float) -> None:
        """Remove the drains whose time is over."""
        if expired := self.now.over(now):
            self.put(self.now.resuming(expired))
            for node in expired:
                self._parts.audit.record(
                    EventKind.NODE_RESUMED,
                    "Its drain was until now.",
                    node="" if node == EVERY_NODE else node,
                )
