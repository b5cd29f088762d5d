"""Some commands of the main scheduler at a time.

Decides how many: each waits for the scheduler's answer most of its time, and more of them would
only wait longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

AT_A_TIME = 4
GivenT = TypeVar("GivenT")
MadeT = TypeVar("MadeT")


def side_by_side(call: Callable[[GivenT], MadeT], each: Sequence[GivenT]) -> list[MadeT]:
    """What ``call`` makes of each, in their order; in threads where they are several."""
    if len(each) <= 1:
        return [call(one) for one in each]
    with ThreadPoolExecutor(min(AT_A_TIME, len(each)), thread_name_prefix="scheduler") as pool:
        return list(pool.map(call, each))
