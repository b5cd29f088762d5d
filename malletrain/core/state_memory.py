"""Which snapshots of a job are in the memory of which nodes, and whether a leaving node can hand
its shards over in the remaining time. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from malletrain.protocol.sizes import shown

IN_MEMORY = "memory"
"""Where a snapshot was put that is in the memory of the nodes (:class:`SnapshotTaken`)."""
KEEPER_RATE = 350e6
"""Bytes a second that go from one node's memory to another's at most: they are encrypted
(docs/how-state-moves.md).
"""
_REMEDY = (
    "Another node gets a copy whenever a snapshot is due, where its memory suffices; with "
    "Snapshot(replicate_every=…) after so many steps."
)


@dataclass(frozen=True)
class HandOverTime:
    """The time that a node has for its hand-over, and how fast that goes."""

    drain_s: float
    """How long a drain may take (``[jobs] drain_timeout``)."""
    grace_s: float
    """Between the main scheduler's notice and the end of the node."""
    mbit: float = 0.0
    """Of the network between two nodes, as measured; 0: it was not."""

    @property
    def seconds(self) -> float:
        """The shorter of the two."""
        return min(self.drain_s, self.grace_s)

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return min(KEEPER_RATE, self.mbit * 125_000) if self.mbit else KEEPER_RATE

    @property
    def bytes(self) -> float:
        """How many can be handed over."""
        return self.seconds * self.rate

    @property
    def explanation(self) -> str:
        """The time and where it comes from."""
        if self.drain_s <= self.grace_s:
            return f"the {self.drain_s:g} s of drain_timeout"
        return f"the {self.grace_s:g} s between the main scheduler's notice and the end of a node"

    def room(self) -> str:
        """How much fits, for who has no job yet."""
        by = "as measured" if 0 < self.mbit * 125_000 < KEEPER_RATE else "which encryption allows"
        return (
            f"A node that leaves can hand over {shown(self.bytes)} of a snapshot in "
            f"memory: within {self.explanation}, at {shown(self.rate)}/s, {by}. Jobs with more "
            "on a node keep a copy on another one, renewed with every snapshot."
        )


def late(newest: Mapping[str, Any], notice: HandOverTime) -> str:
    """Why a node that leaves will not have handed over its part of a snapshot in time; empty: it
    will, or a copy is elsewhere already.

    Args:
        newest: what was reported of the newest snapshot: ``path``, ``bytes``, ``seconds``, over how
            many ``nodes`` it lies, whether it is ``replicated``.
        notice: what there is for it.
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
    """What a job's own processes say: 0 for whatever is no size."""
    size = newest.get(name)
    return float(size) if isinstance(size, int | float) and 0 <= size < math.inf else 0.0


def in_memory(taken: Sequence[int], newest: Mapping[str, Any], notice: HandOverTime) -> str:
    """A sentence for ``malletrain show``; empty where nothing is in memory.

    Args:
        taken: bytes on each node that has some.
        newest: see :func:`late`.
        notice: what there is for a hand-over.
    """
    if not taken:
        return ""
    nodes = "1 node" if len(taken) == 1 else f"{len(taken)} nodes"
    sentence = (
        f"Its snapshots take {shown(sum(taken))} on {nodes}, {shown(max(taken))} at most on one."
    )
    return f"{sentence} {late(newest, notice)}".strip()
