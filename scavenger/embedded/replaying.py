"""From a trace file to what the nodes of an embedded cluster do. Whoever wants to know beforehand
whether a cluster would start asks here, as the cluster itself does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scavenger.trace.files import read
from scavenger.trace.replay import AtEnd, Replay, fit


def read_replay(
    path: Path,
    nodes: Sequence[str],
    *,
    speedup: float = 1.0,
    seed: int = 0,
    start_s: float | None = None,
    duration_s: float | None = None,
    trace_end_s: float | None = None,
    at_end: AtEnd = "repeat",
) -> Replay:
    """What ``nodes`` do as the trace in ``path`` says.

    Args:
        path: The trace.
        nodes: Names of the cluster's nodes.
        speedup: How many seconds of the trace pass in one second.
        seed: Chooses the nodes of the trace that are used.
        start_s: Second of the trace to begin at; None: where most happens.
        duration_s: Real seconds of the trace to use; None: all.
        trace_end_s: Where the trace's observation ends; None: its last event.
        at_end: What comes after the trace: repeat, idle, busy, hold.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no trace, or none that fits.
    """
    whole = read(path, duration_s=trace_end_s)
    if set(whole.names) < set(nodes):  # nodes without an event are busy all the time
        whole = read(path, names=nodes, duration_s=trace_end_s)
    cut = fit(
        whole, nodes, speedup=speedup, duration_s=duration_s, start_s=start_s, seed=seed
    )  # fmt: skip
    return Replay(cut, at_end)
