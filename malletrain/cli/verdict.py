"""How a job ended, as the exit code of the commands that stay until it has: ``wait``, ``logs -f``
and ``status JOB --watch``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

COMPLETED, FAILED, CANCELLED = 0, 1, 3
"""2 is a wrong command line."""
CODES = {"completed": COMPLETED, "cancelled": CANCELLED, "failed": FAILED}
"""State of an ended job → exit code."""


def verdict(states: Iterable[str]) -> int:
    """The exit code for jobs that have ended: that of a failed one first, then of a cancelled."""
    codes = {CODES[state] for state in states}
    return FAILED if FAILED in codes else max(codes, default=COMPLETED)


def exit_code_of(failures: Iterable[Any]) -> int:
    """The exit code of a job that failed: that of the worker that failed first in its last try, as
    a shell tells it (128 and the signal's number for one that was killed); where none is known,
    that of any failed job.

    Args:
        failures: its events of the kind ``workers-failed``, oldest first.
    """
    codes = [event.data.get("exit_code") for event in failures]
    if not codes or not isinstance(codes[-1], int):
        return FAILED
    return 128 - codes[-1] if codes[-1] < 0 else codes[-1] or FAILED
