"""How long the tests wait for what must happen.

No test depends on how fast the machine is. A wait ends when its condition holds; its bound is far
beyond what the busiest machine needs, and below pytest's own limit (setup.cfg), so that a failure
says what did not happen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any, TypeVar

from tests.last_words import without_frames

T = TypeVar("T")

PATIENCE_S = 400.0
"""Seconds until a wait is in vain."""

NEVER_S = 3600.0
"""Seconds of a limit of the product that no healthy run may reach."""


def until(
    condition: Callable[[], T],
    what: str,
    pause_s: float = 0.01,
    details: Callable[[], str] = str,
) -> T:
    """Poll until ``condition()`` is true; return its value.

    Args:
        condition: what is waited for.
        what: the same as a sentence, for the failure.
        pause_s: seconds between two looks.
        details: what the failure shows, such as the end of a log.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, (
            f"Not within {PATIENCE_S:g} s: {what}.\n{without_frames(details())}"
        )
        time.sleep(pause_s)
    return value


def readable(source: Any, patience_s: float = PATIENCE_S) -> bool:
    """Whether there is something to read within ``patience_s`` seconds. Any descriptor number works
    (``select.select`` refuses those above 1,023).
    """
    return bool(wait([source], patience_s))
