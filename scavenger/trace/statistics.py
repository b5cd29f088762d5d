"""Statistics of a trace, and their text for a terminal.
:meth:`scavenger.trace.trace.Trace.statistics` computes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SHORT_GAP_S = 600.0
"""Length below which gaps count as short in the statistics, seconds (10 minutes, as in the
published Summit figures).
"""
HISTOGRAM_EDGES_S = (
    0.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1200.0,
    1800.0,
    3600.0,
    7200.0,
    14400.0,
    28800.0,
    math.inf,
)


@dataclass(frozen=True)
class Statistics:
    """Statistics of a trace. Lengths are of complete gaps only. The idle count is averaged over
    time.
    """

    nodes: int
    """Number of nodes."""
    duration_s: float
    """Length of the trace, seconds."""
    events: int
    """Number of events."""
    idle_mean: float
    """Mean number of idle nodes over time."""
    idle_min: int
    """Minimum number of idle nodes."""
    idle_max: int
    """Maximum number of idle nodes."""
    idle_fraction: float
    """Idle fraction of node-time."""
    gaps: int
    """Number of complete gaps."""
    gap_median_s: float
    """Median length, seconds."""
    gap_mean_s: float
    """Mean length, seconds."""
    gap_short_fraction: float
    """Fraction of gaps shorter than :data:`SHORT_GAP_S`."""
    histogram: tuple[tuple[float, float, int], ...]
    """(from, to, gaps) by length in seconds; the last ``to`` is infinite"""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON. An infinite bin edge and a statistic without data are
        None.
        """
        out: dict[str, Any] = {
            k: (None if isinstance(v, float) and not math.isfinite(v) else v)
            for k, v in self.__dict__.items()
            if k != "histogram"
        }
        out["histogram"] = [
            {"from_s": a, "to_s": b if math.isfinite(b) else None, "gaps": n}
            for a, b, n in self.histogram
        ]
        return out


def summary(statistics: Statistics) -> Mapping[str, str]:
    """Return the statistics as text for a terminal, label → text."""
    s = statistics
    return {
        "nodes": f"{s.nodes}",
        "duration": f"{s.duration_s:,.0f} s ({s.duration_s / 86400:.2f} days), {s.events:,} events",
        "idle nodes": f"{s.idle_mean:.1f} on average ({100 * s.idle_fraction:.1f} %), "
        f"{s.idle_min} to {s.idle_max}",
        "gaps": f"{s.gaps:,}; median {s.gap_median_s:,.0f} s, mean {s.gap_mean_s:,.0f} s, "
        f"{100 * s.gap_short_fraction:.0f} % shorter than {SHORT_GAP_S / 60:.0f} minutes",
    }
