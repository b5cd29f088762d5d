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


def side_by_side(call: Callable[[GivenT], MadeT], each: Sequence[GivenT]) -> list[MadeT]:
    """Return the results of ``call`` for each item, in order. Uses threads if there are several
    items.
    """
    if len(each) <= 1:
        return [call(one) for one in each]
    with ThreadPoolExecutor(min(AT_A_TIME, len(each)), thread_name_prefix="scheduler") as pool:
        return list(pool.map(call, each))
