"""Decides which waiting request is answered next: users take turns, and the event loop does other
work in between.

In one round of the loop, the answers that begin take ROUND_S together. Without this limit all
requests that become due at one moment (:mod:`malletrain.daemon.rates`) would be answered at once,
and no message would be read meanwhile. A request does not wait if it is the only one.
"""

from __future__ import annotations

import asyncio

from malletrain.daemon.fair_queue import FairQueue

ROUND_S = 0.005
"""Processor time for the answers that begin in one round of the loop, seconds."""
MIN_COST_S = 0.0005
"""Minimum processor time charged for an answer, seconds. Its cost is forecast from earlier
answers.
"""


class Answering:
    """The queue of waiting requests of one daemon. Used from its loop."""

    def __init__(self) -> None:
        self._waiting: FairQueue[str, tuple[asyncio.Future[None], float]] = FairQueue()
        self._remaining_s = ROUND_S
        """Processor time that remains in this round of the loop, seconds."""
        self._round_scheduled = False
        """Whether the next round is scheduled."""

    async def turn(self, user: str, usual_s: float) -> None:
        """Wait for the turn of one request of ``user``. ``usual_s``: processor time that its answer
        usually takes, seconds.
        """
        loop = asyncio.get_running_loop()
        if self._remaining_s > 0.0 and not self._waiting:
            self._begin(usual_s, loop)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.put(user, (turn, usual_s))
        self._schedule_round(loop)
        await turn

    def _begin(self, usual_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._remaining_s -= max(usual_s, MIN_COST_S)
        self._schedule_round(loop)

    def _schedule_round(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._round_scheduled:
            self._round_scheduled = True
            loop.call_soon(self._run_round, loop)

    def _run_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._round_scheduled, self._remaining_s = False, ROUND_S
        while self._waiting and self._remaining_s > 0.0:
            turn, usual_s = self._waiting.take()
            if not turn.done():  # else its client no longer waits
                self._begin(usual_s, loop)
                turn.set_result(None)
