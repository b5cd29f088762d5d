"""Exit codes of the commands that wait until jobs have ended: ``wait``, ``logs -f`` and
``status JOB --watch``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

COMPLETED, FAILED, CANCELLED = 0, 1, 3
"""2 means a wrong command line."""
EXIT_CODES = {"completed": COMPLETED, "cancelled": CANCELLED, "failed": FAILED}
"""State of an ended job → exit code."""


def exit_code(states: Iterable[str]) -> int:
    """Return the exit code for ended jobs: 1 if one failed, else 3 if one was cancelled,
    else 0."""
    codes = {EXIT_CODES[state] for state in states}
    return FAILED if FAILED in codes else max(codes, default=COMPLETED)


def exit_code_of_failed(failures: Iterable[Any]) -> int:
    """Return the exit code for one failed job: that of the worker that failed first in the last
    try.

    Args:
        failures: events of the kind ``workers-failed`` of the job, oldest first.

    Returns:
        The worker's exit code; 128 and the signal's number if a signal killed it, as in a shell; 1
        if it is unknown.
    """
    codes = [event.data.get("exit_code") for event in failures]
    if not codes or not isinstance(codes[-1], int):
        return FAILED
    return 128 - codes[-1] if codes[-1] < 0 else codes[-1] or FAILED
