"""Converts a trace file into the states of an embedded cluster's nodes. The cluster uses it, and so
do callers that want to know in advance whether a cluster would start.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scavenger.trace.amounts import has_amounts
from scavenger.trace.amounts import parse as parse_amounts
from scavenger.trace.files import parse, read_text
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
    """Return the states of ``nodes`` by the trace in ``path``. With amounts, they are those of the
    units of the nodes.

    Args:
        path: The trace.
        nodes: Names of the cluster's nodes.
        speedup: Seconds of the trace per real second.
        seed: Seed of the choice of the trace's nodes.
        start_s: Start in the trace, seconds; None: where most gaps begin.
        duration_s: Real seconds of the trace to use; None: all.
        trace_end_s: End of the trace's observation, seconds; None: its last event.
        at_end: What comes after the trace: repeat, idle, busy, hold.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a trace, or does not fit the options.
    """
    text = read_text(path)
    if has_amounts(text):
        amounts = parse_amounts(text, duration_s=trace_end_s, where=str(path)).for_nodes(nodes)
        units = amounts.slots()
        chosen = fit(
            units, units.names, speedup=speedup, duration_s=duration_s, start_s=start_s, seed=seed
        )
        return Replay(chosen, at_end)
    whole = parse(text, duration_s=trace_end_s, where=str(path))
    if set(whole.names) < set(nodes):  # nodes without an event are always busy
        whole = parse(text, names=nodes, duration_s=trace_end_s, where=str(path))
    cut = fit(
        whole, nodes, speedup=speedup, duration_s=duration_s, start_s=start_s, seed=seed
    )  # fmt: skip
    return Replay(cut, at_end)
