"""How a job ended, as the exit code of the commands that stay until it has: ``wait``, ``logs -f``
and ``status JOB --watch``.
"""

from __future__ import annotations

from collections.abc import Iterable

COMPLETED, FAILED, CANCELLED = 0, 1, 3
"""2 is a wrong command line."""
CODES = {"completed": COMPLETED, "cancelled": CANCELLED, "failed": FAILED}
"""State of an ended job → exit code."""


def verdict(states: Iterable[str]) -> int:
    """The exit code for jobs that have ended: that of a failed one first, then of a cancelled."""
    codes = {CODES[state] for state in states}
    return FAILED if FAILED in codes else max(codes, default=COMPLETED)
