"""Describes the snapshots of a job in the memory of its nodes, and checks whether a leaving node
can hand over its shards in time. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from malletrain.protocol.counting import counted
from malletrain.protocol.sizes import shown

IN_MEMORY = "memory"
"""Path of a snapshot that is in the memory of the nodes (:class:`SnapshotTaken`)."""
KEEPER_RATE = 350e6
"""Maximum rate of a copy from one node's memory to another's, bytes/s. Encryption limits it
(docs/how-state-moves.md).
"""
_REMEDY = (
    "Another node gets a copy whenever a snapshot is due, where its memory suffices; with "
    "Snapshot(replicate_every=…) after so many steps."
)


@dataclass(frozen=True)
class HandOverTime:
    """The time that a node has for its hand-over, and the rate of the hand-over."""

    drain_s: float
    """Maximum time of a drain (``[jobs] drain_timeout``), seconds."""
    grace_s: float
    """Time from the main scheduler's notice to the end of the node, seconds."""
    mbit: float = 0.0
    """Measured throughput between two nodes, Mbit/s; 0 if it was not measured."""

    @property
    def seconds(self) -> float:
        """Available time, seconds: the shorter of the two."""
        return min(self.drain_s, self.grace_s)

    @property
    def rate(self) -> float:
        """Expected rate, bytes/s."""
        return min(KEEPER_RATE, self.mbit * 125_000) if self.mbit else KEEPER_RATE

    @property
    def bytes(self) -> float:
        """Number of bytes that can be handed over in the available time."""
        return self.seconds * self.rate

    @property
    def explanation(self) -> str:
        """The available time and its origin, as part of a sentence."""
        if self.drain_s <= self.grace_s:
            return f"the {self.drain_s:g} s of drain_timeout"
        return f"the {self.grace_s:g} s between the main scheduler's notice and the end of a node"

    def room(self) -> str:
        """Return a sentence that says how much can be handed over, for users without a job yet."""
        by = "as measured" if 0 < self.mbit * 125_000 < KEEPER_RATE else "which encryption allows"
        return (
            f"A node that leaves can hand over {shown(self.bytes)} of a snapshot in "
            f"memory: within {self.explanation}, at {shown(self.rate)}/s, {by}. Jobs with more "
            "on a node keep a copy on another one, renewed with every snapshot."
        )


def late(newest: Mapping[str, Any], notice: HandOverTime) -> str:
    """Return why a leaving node cannot hand over its part of a snapshot in time; empty if it can,
    or if another node already has a copy.

    Args:
        newest: report of the newest snapshot: ``path``, ``bytes``, ``seconds``, the number of
            ``nodes`` that hold it, and whether it is ``replicated``.
        notice: time and rate of a hand-over.
    """
    if newest.get("replicated"):
        return ""
    size, seconds = _number(newest, "bytes"), _number(newest, "seconds")
    if newest.get("path") == IN_MEMORY and seconds > notice.seconds / 2:
        return (
            f"The last hand-over of {shown(size)} took {seconds:.3g} s of {notice.explanation}: a "
            f"node that leaves may not get it done. {_REMEDY}"
        )
    part = size / max(1.0, _number(newest, "nodes"))
    needed = part / notice.rate
    if needed <= notice.seconds:
        return ""
    return (
        f"A node that leaves hands over {shown(part)}, which takes {needed:.3g} s at "
        f"{shown(notice.rate)}/s and does not fit into {notice.explanation}. {_REMEDY}"
    )


def _number(newest: Mapping[str, Any], name: str) -> float:
    """Return a size from a report of the job's processes; 0 if it is not a valid size."""
    size = newest.get(name)
    return float(size) if isinstance(size, int | float) and 0 <= size < math.inf else 0.0


def in_memory(taken: Sequence[int], newest: Mapping[str, Any], notice: HandOverTime) -> str:
    """Return a sentence for ``malletrain show``; empty if no snapshot is in memory.

    Args:
        taken: bytes on each node that holds a part.
        newest: see :func:`late`.
        notice: time and rate of a hand-over.
    """
    if not taken:
        return ""
    nodes = counted(len(taken), "node")
    sentence = (
        f"Its snapshots take {shown(sum(taken))} on {nodes}, {shown(max(taken))} at most on one."
    )
    return f"{sentence} {late(newest, notice)}".strip()
