"""Statistics of the idle nodes of a machine: number, times, lengths. Decides nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from malletrain.sim.idle import require_time
from malletrain.sim.workloads import WorkloadError
from scavenger.trace.trace import Trace

LENGTH_EDGES_S = (
    0.0,
    60.0,
    300.0,
    600.0,
    1800.0,
    3600.0,
    2 * 3600.0,
    6 * 3600.0,
    24 * 3600.0,
    math.inf,
)
"""Edges of the histogram of gap lengths."""
POINTS = 400
"""Number of points of the curve of idle nodes over time."""


@dataclass(frozen=True)
class LengthBin:
    """Gaps of at least ``from_s`` and less than ``to_s`` seconds: their number and node-hours."""

    from_s: float
    to_s: float
    gaps: int
    node_hours: float


@dataclass(frozen=True)
class GapReport:
    """The gaps of a machine.

    Args:
        nodes, hours: size of the machine, length of the observation.
        idle_mean, idle_fraction: idle nodes on average, and as a fraction of the machine.
        idle_node_hours: total idle node-hours.
        gaps, median_s, mean_s: number of complete gaps and their lengths (None if there is none).
        Gaps open at
            an end of the observation count in the node-hours and not here.
        bins: the histogram; gaps cut off by an end of the observation count with their observed
            part.
        over_time: (hour, fewest, mean, most idle nodes) of equal pieces of the observation.
    """

    nodes: int
    hours: float
    idle_mean: float
    idle_fraction: float
    idle_node_hours: float
    gaps: int
    median_s: float | None
    mean_s: float | None
    bins: tuple[LengthBin, ...]
    over_time: tuple[tuple[float, int, float, int], ...]

    def longer_than(self, seconds: float) -> float:
        """Return the fraction of the idle node-hours in gaps of at least this length (an edge of
        the bins).
        """
        total = sum(b.node_hours for b in self.bins)
        return sum(b.node_hours for b in self.bins if b.from_s >= seconds) / total if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; the open edge of the last bin is None."""
        plain = {
            name: getattr(self, name)
            for name in ("nodes", "hours", "idle_mean", "idle_fraction", "idle_node_hours")
        }
        plain |= {"gaps": self.gaps, "gap_median_s": self.median_s, "gap_mean_s": self.mean_s}
        plain["histogram"] = [
            {
                "from_s": b.from_s,
                "to_s": b.to_s if math.isfinite(b.to_s) else None,
                "gaps": b.gaps,
                "node_hours": b.node_hours,
            }
            for b in self.bins
        ]
        plain["over_time"] = [
            {"hour": h, "fewest": a, "mean": m, "most": b} for h, a, m, b in self.over_time
        ]
        return plain


def gap_report(trace: Trace) -> GapReport:
    """Return the gaps in ``trace``. Raises WorkloadError if it has no duration or no nodes."""
    if not trace.names:
        raise WorkloadError("The trace has no nodes; there is nothing to assess.")
    require_time(trace)
    gaps = trace.gaps()
    lengths = gaps.length
    complete = lengths[gaps.complete]
    edges = np.asarray(LENGTH_EDGES_S)
    number, _ = np.histogram(lengths, bins=edges)
    seconds, _ = np.histogram(lengths, bins=edges, weights=lengths)
    idle_s = float(lengths.sum())
    return GapReport(
        nodes=len(trace.names),
        hours=trace.duration_s / 3600.0,
        idle_mean=idle_s / trace.duration_s,
        idle_fraction=idle_s / trace.duration_s / len(trace.names),
        idle_node_hours=idle_s / 3600.0,
        gaps=len(complete),
        median_s=float(np.median(complete)) if len(complete) else None,
        mean_s=float(complete.mean()) if len(complete) else None,
        bins=tuple(
            LengthBin(
                LENGTH_EDGES_S[k], LENGTH_EDGES_S[k + 1], int(number[k]), float(seconds[k]) / 3600.0
            )
            for k in range(len(number))
        ),
        over_time=_over_time(trace),
    )


def _over_time(trace: Trace) -> tuple[tuple[float, int, float, int], ...]:
    times, counts = trace.idle_count()
    edges = np.linspace(0.0, trace.duration_s, POINTS + 1)
    # The integral of the step function at any time, so that means over pieces are exact.
    area = np.concatenate([[0.0], np.cumsum(counts[:-1] * np.diff(times))])
    at = np.searchsorted(times, edges, side="right") - 1
    whole = area[at] + counts[at] * (edges - times[at])
    pieces = []
    for k in range(POINTS):
        inside = counts[at[k] : max(at[k], np.searchsorted(times, edges[k + 1]) - 1) + 1]
        mean = float((whole[k + 1] - whole[k]) / (edges[k + 1] - edges[k]))
        pieces.append((float(edges[k]) / 3600.0, int(inside.min()), mean, int(inside.max())))
    return tuple(pieces)


def typical_window(trace: Trace, hours: float) -> tuple[float, float]:
    """Return begin and end (seconds) of the window of this length whose mean number of idle nodes
    is nearest to that of the whole trace. A window without idle nodes is typical only if the trace
    has none.

    Windows begin a quarter of their length apart. If the trace is not longer than ``hours``, it is
    the window.
    """
    length = hours * 3600.0
    if length >= trace.duration_s:
        return 0.0, trace.duration_s
    times, counts = trace.idle_count()
    area = np.concatenate([[0.0], np.cumsum(counts[:-1] * np.diff(times))])

    def until(moments: Any) -> Any:
        at = np.searchsorted(times, moments, side="right") - 1
        return area[at] + counts[at] * (moments - times[at])

    starts = np.arange(0.0, trace.duration_s - length, length / 4)
    means = (until(starts + length) - until(starts)) / length
    mean = float(until(np.array([trace.duration_s]))[0]) / trace.duration_s
    away = np.where((means > 0) | (mean == 0), np.abs(means - mean), np.inf)
    begin = float(starts[int(np.argmin(away))])
    return begin, begin + length
