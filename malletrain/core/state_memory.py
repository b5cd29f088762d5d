"""What is said of a job's snapshots in the memory of its nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from malletrain.protocol.sizes import shown

IN_MEMORY = "memory"
"""Where a snapshot was put that is in the memory of the nodes (:class:`SnapshotTaken`)."""


def in_memory(taken: Sequence[int], newest: Mapping[str, Any], drain_s: float) -> str:
    """A sentence for ``malletrain show``; empty where nothing is in memory.

    Args:
        taken: bytes on each node that has some.
        newest: what was reported of the newest snapshot: ``path``, ``bytes``, ``seconds``.
        drain_s: how long a drain may take (``[jobs] drain_timeout``).
    """
    if not taken:
        return ""
    nodes = "1 node" if len(taken) == 1 else f"{len(taken)} nodes"
    said = f"Its snapshots take {shown(sum(taken))} on {nodes}, {shown(max(taken))} at most on one."
    seconds = float(newest.get("seconds", 0.0))
    if newest.get("path") != IN_MEMORY or seconds <= drain_s / 2:
        return said
    return (
        f"{said} The last hand-over of {shown(float(newest.get('bytes', 0)))} took {seconds:.3g} s "
        f"of the {drain_s:g} s that drain_timeout allows: a node that leaves may not get it done. "
        "With Snapshot(replicate_every=…) another node has a copy beforehand."
    )
