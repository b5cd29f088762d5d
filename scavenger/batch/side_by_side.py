"""Runs several commands of the main scheduler in parallel.

Decides how many: a command waits for the scheduler's answer most of its time, so more in parallel
would only wait longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

AT_A_TIME = 4
GivenT = TypeVar("GivenT")
MadeT = TypeVar("MadeT")


def side_by_side(call: Callable[[GivenT], MadeT], items: Sequence[GivenT]) -> list[MadeT]:
    """Return the results of ``call`` for each item, in order. Uses threads if there are several
    items.
    """
    if len(items) <= 1:
        return [call(item) for item in items]
    with ThreadPoolExecutor(min(AT_A_TIME, len(items)), thread_name_prefix="scheduler") as pool:
        return list(pool.map(call, items))
