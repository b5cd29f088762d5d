"""Which nodes and times operators have excluded from leasing; stored, so that it outlives the
daemon.

:mod:`malletrain.core.restraint` decides what may be leased.
"""

from __future__ import annotations

import msgspec

from malletrain.core.restraint import EVERY_NODE, Restraint
from malletrain.daemon.parts import Parts
from malletrain.protocol.event_kinds import EventKind


class Restraints:
    """Of one daemon. Changed within steps only."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        text = parts.store.restraint()
        self.now = msgspec.json.decode(text, type=Restraint) if text else Restraint()

    def put(self, restraint: Restraint) -> None:
        """From now on this is left alone."""
        self._parts.store.put_restraint(msgspec.json.encode(restraint).decode())
        self.now = restraint

    def expire(self, now: float) -> None:
        """Forget the drains whose time is up."""
        if over := self.now.over(now):
            self.put(self.now.resuming(over))
            for node in over:
                self._parts.audit.record(
                    EventKind.NODE_RESUMED,
                    "Its drain was until now.",
                    node="" if node == EVERY_NODE else node,
                )
