"""The restrictions of leasing that operators have ordered: a pause of all leasing, and nodes that
are drained or excluded. Pure.

Decides which nodes may be leased. The terms are Slurm's: a *drained* node is released and not
leased again until a time, or until it is resumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timezone

import msgspec

from scavenger.hostlist import named

EVERY_NODE = "*"
"""Stands for all nodes, including those that appear later."""


class Restriction(msgspec.Struct, frozen=True):
    """A pause, drain or exclusion."""

    by: str
    """Operator who ordered it."""
    since: float
    """Start, seconds since the epoch."""
    until: float | None = None
    """End, seconds since the epoch; None if it lasts until an operator ends it."""
    why: str = ""
    """Reason in the operator's words."""

    def over(self, now: float) -> bool:
        """Return whether its time is over."""
        return self.until is not None and now >= self.until


class Restrictions(msgspec.Struct, frozen=True):
    """All restrictions in force."""

    paused: Restriction | None = None
    """Pause of new leases; None if there is none."""
    drained: Mapping[str, Restriction] = {}
    """Node, or :data:`EVERY_NODE`, → its drain."""
    excluded: Mapping[str, Restriction] = {}
    """Node → its exclusion: no new lease is taken there. An existing lease stays."""

    def refusal(self, node: str) -> str:
        """Return why the node may not be leased, as a sentence; empty if it may."""
        if self.paused is not None:
            return f"Paused{_by(self.paused)}."
        for name in (node, EVERY_NODE):
            if name in self.drained:
                return f"Drained{_by(self.drained[name])}."
        return f"Excluded{_by(self.excluded[node])}." if node in self.excluded else ""

    def sentence(self) -> str:
        """Return all restrictions as sentences; empty if there are none."""
        sentences = []
        if self.paused is not None:
            sentences.append(f"Paused{_by(self.paused)}: nothing new is leased.")
        if EVERY_NODE in self.drained:
            sentences.append(f"All nodes are drained{_by(self.drained[EVERY_NODE])}.")
        for word, restrictions in (("Drained", self.drained), ("Excluded", self.excluded)):
            if names := sorted(name for name in restrictions if name != EVERY_NODE):
                sentences.append(f"{word}: {named(names)}.")
        return " ".join(sentences)

    def pausing(self, hold: Restriction | None) -> Restrictions:
        """Return a copy with this pause, or without a pause."""
        return msgspec.structs.replace(self, paused=hold)

    def draining(self, nodes: Iterable[str], hold: Restriction) -> Restrictions:
        """Return a copy with these nodes drained."""
        return msgspec.structs.replace(self, drained={**self.drained, **dict.fromkeys(nodes, hold)})

    def excluding(self, nodes: Iterable[str], hold: Restriction) -> Restrictions:
        """Return a copy with these nodes excluded."""
        excluded = {**self.excluded, **dict.fromkeys(nodes, hold)}
        return msgspec.structs.replace(self, excluded=excluded)

    def resuming(self, nodes: Iterable[str]) -> Restrictions:
        """Return a copy with these nodes neither drained nor excluded."""
        resumed = set(nodes)
        return msgspec.structs.replace(
            self,
            drained={n: h for n, h in self.drained.items() if n not in resumed},
            excluded={n: h for n, h in self.excluded.items() if n not in resumed},
        )

    def over(self, now: float) -> list[str]:
        """Return the nodes whose drain has reached its end."""
        return sorted(name for name, hold in self.drained.items() if hold.over(now))


def _by(hold: Restriction) -> str:
    until = "" if hold.until is None else f" until {_moment(hold.until)}"
    why = f" ({hold.why})" if hold.why else ""
    return f" by {hold.by}{until}{why}"


def _moment(time: float) -> str:
    return f"{datetime.fromtimestamp(time, timezone.utc):%Y-%m-%d %H:%M} UTC"
