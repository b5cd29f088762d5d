"""One set of colours for terminal and plots, distinguishable with any kind of colour vision.

The colours of jobs are those of Okabe and Ito ("Color Universal Design", 2008). Colour is never the
only carrier of a meaning: the screen also shows names, plots also have hatches and marks.
"""

from __future__ import annotations

from collections.abc import Iterable

JOB_COLOURS: tuple[str, ...] = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
)
"""Colours of jobs in the order of their submission; they repeat after the last."""

BUSY = "#D9D9D9"
"""Node in use by the main scheduler."""
IDLE = "#FFFFFF"
"""Node that is idle and not leased."""
LEASED = "#9E9E9E"
"""Node that is leased, without a job."""
MARK = "#000000"
"""Preemptions."""

STATE_STYLES: dict[str, str] = {
    "queued": "yellow",
    "profiling": "cyan",
    "running": "green",
    "suspended": "yellow",
    "completed": "bold green",
    "failed": "bold red",
    "cancelled": "magenta",
    # of nodes
    "busy": "dim",
    "idle": "",
    "leasing": "cyan",
    "free": "yellow",
    "job": "green",
    "leaving": "red",
    "sick": "bold red",
    "slow": "bold yellow",
}
"""Job or node state → rich style."""


def colours(jobs: Iterable[str]) -> dict[str, str]:
    """Return a colour for each of ``jobs`` (in the order of submission)."""
    names = list(dict.fromkeys(jobs))
    return {name: JOB_COLOURS[k % len(JOB_COLOURS)] for k, name in enumerate(names)}
