"""Wakes the core when something is due although no event arrives.

The next due time is computed once for all transactions of a batch, because that asks every job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LEAST_S = 0.005
"""What is due at once waits so long, so that it does not keep the loop."""


class Alarm:
    """Of one core.

    Args:
        guard: makes a callback of the loop of a call.
        now: the time, seconds.
        when: when something is due, seconds; None: nothing is.
        ring: what is called then.
    """

    def __init__(
        self,
        guard: Callable[[Callable[[], None]], Callable[[], None]],
        now: Callable[[], float],
        when: Callable[[], float | None],
        ring: Callable[[], None],
    ) -> None:
        self._look_guarded, self._ring = guard(self._look), guard(ring)
        self._now, self._when = now, when
        self._looking: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        """Something may be due at another time than before."""
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_soon(self._look_guarded)

    def close(self) -> None:
        """Nothing is called any more."""
        for waiting in (self._looking, self._timer):
            if waiting is not None:
                waiting.cancel()
        self._looking = self._timer = None

    def _look(self) -> None:
        self._looking = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due := self._when()) is not None:
            delay = max(LEAST_S, due - self._now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._ring)
