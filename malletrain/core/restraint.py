"""Which nodes operators have excluded from leasing: all for a while, or some. Pure.

Decides which nodes may be leased and for how long. The terms are Slurm's: a *drained* node is
released and left alone until a time, or until it is resumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timezone

import msgspec

from scavenger.hostlist import named

EVERY_NODE = "*"
"""Stands for all nodes, those that nobody has seen yet included."""


class Restriction(msgspec.Struct, frozen=True):
    """Something is left alone. ``by``: who said so; ``since``, ``until``: seconds since the epoch;
    until None it holds until somebody ends it. ``why``: in the words of who said so.
    """

    by: str
    since: float
    until: float | None = None
    why: str = ""

    def over(self, now: float) -> bool:
        """Whether its time is up."""
        return self.until is not None and now >= self.until


class Restraint(msgspec.Struct, frozen=True):
    """All that is left alone. ``paused``: nothing new is leased."""

    paused: Restriction | None = None
    drained: Mapping[str, Restriction] = {}
    """By node, or for all of them."""
    excluded: Mapping[str, Restriction] = {}
    """By node: no lease is taken there any more; one that is held stays."""

    def refusal(self, node: str) -> str:
        """Why the node is not leased, as a sentence; empty: nobody has said that it may not be."""
        if self.paused is not None:
            return f"Paused{_by(self.paused)}."
        for name in (node, EVERY_NODE):
            if name in self.drained:
                return f"Drained{_by(self.drained[name])}."
        return f"Excluded{_by(self.excluded[node])}." if node in self.excluded else ""

    def sentence(self) -> str:
        """All of it as a sentence; empty: nothing."""
        sentences = []
        if self.paused is not None:
            sentences.append(f"Paused{_by(self.paused)}: nothing new is leased.")
        if EVERY_NODE in self.drained:
            sentences.append(f"All nodes are drained{_by(self.drained[EVERY_NODE])}.")
        for word, restrictions in (("Drained", self.drained), ("Excluded", self.excluded)):
            if names := sorted(name for name in restrictions if name != EVERY_NODE):
                sentences.append(f"{word}: {named(names)}.")
        return " ".join(sentences)

    def pausing(self, hold: Restriction | None) -> Restraint:
        """With a pause, or without one."""
        return msgspec.structs.replace(self, paused=hold)

    def draining(self, nodes: Iterable[str], hold: Restriction) -> Restraint:
        """With these nodes drained."""
        return msgspec.structs.replace(self, drained={**self.drained, **dict.fromkeys(nodes, hold)})

    def excluding(self, nodes: Iterable[str], hold: Restriction) -> Restraint:
        """With these nodes excluded."""
        made = {**self.excluded, **dict.fromkeys(nodes, hold)}
        return msgspec.structs.replace(self, excluded=made)

    def resuming(self, nodes: Iterable[str]) -> Restraint:
        """With these nodes neither drained nor excluded."""
        gone = set(nodes)
        return msgspec.structs.replace(
            self,
            drained={n: h for n, h in self.drained.items() if n not in gone},
            excluded={n: h for n, h in self.excluded.items() if n not in gone},
        )

    def over(self, now: float) -> list[str]:
        """The nodes whose drain ends by its time."""
        return sorted(name for name, hold in self.drained.items() if hold.over(now))


def _by(hold: Restriction) -> str:
    until = "" if hold.until is None else f" until {_moment(hold.until)}"
    why = f" ({hold.why})" if hold.why else ""
    return f" by {hold.by}{until}{why}"


def _moment(time: float) -> str:
    return f"{datetime.fromtimestamp(time, timezone.utc):%Y-%m-%d %H:%M} UTC"
