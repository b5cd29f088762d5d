"""One set of colours for terminal and pictures, told apart by people with any kind of colour
vision.

The colours of jobs are those of Okabe and Ito ("Color Universal Design", 2008). Colour is never the
only carrier of a meaning: names stand beside it on the screen, hatches and marks in pictures.
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
"""In use by the main scheduler."""
IDLE = "#FFFFFF"
"""Idle and not leased."""
LEASED = "#9E9E9E"
"""Leased, and no job on it."""
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
"""Style of each job and node state in rich's words."""


def colours(jobs: Iterable[str]) -> dict[str, str]:
    """A colour for each of ``jobs`` (in the order of submission)."""
    names = list(dict.fromkeys(jobs))
    return {name: JOB_COLOURS[k % len(JOB_COLOURS)] for k, name in enumerate(names)}
