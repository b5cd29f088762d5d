"""Decides which waiting request is answered next: users take turns, and the event loop does other
work in between.

In one round of the loop, as many answers begin as take ROUND_S together. Otherwise all requests
that became due at one moment (:mod:`malletrain.daemon.rates`) would be answered in one go, and no
message would be read meanwhile. A request does not wait if there is no other.
"""

from __future__ import annotations

import asyncio

from malletrain.daemon.fair_queue import FairQueue

ROUND_S = 0.005
"""Of the processor, for answers that begin in one round of the loop."""
LEAST_S = 0.0005
"""An answer counts for so much at least: what one takes is foretold from those before it."""


class Answering:
    """Of one daemon. Used from its loop."""

    def __init__(self) -> None:
        self._waiting: FairQueue[str, tuple[asyncio.Future[None], float]] = FairQueue()
        self._remaining_s = ROUND_S
        """Of this round."""
        self._due = False
        """The next round is asked for."""

    async def turn(self, user: str, usual_s: float) -> None:
        """Wait for the turn of one request of ``user``, whose answer usually takes so much of the
        processor.
        """
        loop = asyncio.get_running_loop()
        if self._remaining_s > 0.0 and not self._waiting:
            self._begin(usual_s, loop)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.put(user, (turn, usual_s))
        self._soon(loop)
        await turn

    def _begin(self, usual_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._remaining_s -= max(usual_s, LEAST_S)
        self._soon(loop)

    def _soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._due:
            self._due = True
            loop.call_soon(self._round, loop)

    def _round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due, self._remaining_s = False, ROUND_S
        while self._waiting and self._remaining_s > 0.0:
            turn, usual_s = self._waiting.take()
            if not turn.done():  # else nobody waits for the answer any more
                self._begin(usual_s, loop)
                turn.set_result(None)
