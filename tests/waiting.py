"""Waits of the tests. No test depends on the speed of the machine.

A wait ends when its condition is true. Its limit is far above what the busiest machine needs, and
below pytest's own limit (setup.cfg), so that a failure says what did not happen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any, TypeVar

from tests.last_words import without_frames

T = TypeVar("T")

PATIENCE_S = 400.0
"""Maximum duration of a wait, seconds."""

NEVER_S = 3600.0
"""A limit of the product that no healthy run may reach, seconds."""


def until(
    condition: Callable[[], T],
    what: str,
    pause_s: float = 0.01,
    details: Callable[[], str] = str,
) -> T:
    """Poll until ``condition()`` is true; return its value.

    Args:
        condition: the condition.
        what: the same as a sentence, for the failure.
        pause_s: time between two polls, seconds.
        details: returns what the failure shows, such as the end of a log.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, (
            f"Not within {PATIENCE_S:g} s: {what}.\n{without_frames(details())}"
        )
        time.sleep(pause_s)
    return value


def readable(source: Any, patience_s: float = PATIENCE_S) -> bool:
    """Return whether there is something to read within ``patience_s`` seconds. Any descriptor
    number works (``select.select`` refuses those above 1,023).
    """
    return bool(wait([source], patience_s))
