"""Wakes the core when something is due although no event arrives.

The next due time is computed once for all transactions of a batch, because that asks every job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

MIN_DELAY_S = 0.005
"""Minimum delay of a call, seconds, so that calls do not monopolise the loop."""


class Alarm:
    """The timer of one core.

    Args:
        guard: wraps a function as a callback of the loop.
        now: returns the time, seconds.
        when: returns the next due time, seconds; None if nothing is due.
        ring: called at that time.
    """

    def __init__(
        self,
        guard: Callable[[Callable[[], None]], Callable[[], None]],
        now: Callable[[], float],
        when: Callable[[], float | None],
        ring: Callable[[], None],
    ) -> None:
        self._set_timer_guarded, self._ring = guard(self._set_timer), guard(ring)
        self._now, self._when = now, when
        self._pending_update: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        """Compute the due time again, once in this round of the loop."""
        if self._pending_update is None:
            self._pending_update = asyncio.get_running_loop().call_soon(self._set_timer_guarded)

    def close(self) -> None:
        """Cancel all pending calls."""
        for handle in (self._pending_update, self._timer):
            if handle is not None:
                handle.cancel()
        self._pending_update = self._timer = None

    def _set_timer(self) -> None:
        self._pending_update = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due := self._when()) is not None:
            delay = max(MIN_DELAY_S, due - self._now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._ring)
