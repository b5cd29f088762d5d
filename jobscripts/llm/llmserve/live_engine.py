"""A simulated engine on the real clock: an inference server without a GPU. Runs in an asyncio loop.
As in a real engine, requests without room wait, the oldest first.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from llmserve.engine_model import EngineReport, EngineTimes, SimulatedEngine
from llmserve.replicas import Capacity
from malletrain.waits import happens


@dataclass(eq=False)
class _Attempt:
    number: int
    ids: Sequence[int]
    max_tokens: int
    reports: asyncio.Queue[EngineReport] = field(default_factory=asyncio.Queue)

    @property
    def tokens(self) -> int:
        return len(self.ids) + self.max_tokens


class LiveEngine:
    """One engine. :meth:`run` has to run while it is used.

    Args:
        times: durations of its iterations.
        capacity: what it holds at once.
        clock: seconds.
    """

    def __init__(
        self,
        times: EngineTimes,
        capacity: Capacity,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity = capacity
        self._engine = SimulatedEngine(times)
        self._clock = clock
        self._waiting: deque[_Attempt] = deque()
        self._running: dict[int, _Attempt] = {}
        self._changed = asyncio.Event()
        self._number = 0

    async def run(self) -> None:
        """Compute until it is cancelled."""
        while True:
            self._changed.clear()
            self._advance()
            self._admit()
            due = self._engine.next_iteration()
            pause_s = None if due is None else max(0.0, due - self._clock())
            await happens(self._changed, pause_s)

    async def generate(
        self, ids: Sequence[int], max_tokens: int
    ) -> AsyncGenerator[EngineReport, None]:
        """Yield reports of what is generated; the last one has ``is_last``. An iterator that is
        closed earlier stops the attempt.

        Args:
            ids: the prompt; with ``max_tokens`` within the engine's KV memory.
            max_tokens: ids to generate.
        """
        self._number += 1
        attempt = _Attempt(self._number, ids, max_tokens)
        self._waiting.append(attempt)
        self._changed.set()
        try:
            while True:
                report = await attempt.reports.get()
                yield report
                if report.is_last:
                    return
        finally:
            self._forget(attempt)

    @property
    def running(self) -> int:
        """Number of attempts that are computed."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of attempts that wait for room."""
        return len(self._waiting)

    def _advance(self) -> None:
        for report in self._engine.advance(self._clock()):
            attempt = self._running[report.attempt]
            attempt.reports.put_nowait(report)
            if report.is_last:
                del self._running[report.attempt]

    def _admit(self) -> None:
        tokens = sum(attempt.tokens for attempt in self._running.values())
        while self._waiting and len(self._running) < self.capacity.slots:
            attempt = self._waiting[0]
            if tokens + attempt.tokens > self.capacity.kv_tokens:
                return
            self._waiting.popleft()
            tokens += attempt.tokens
            self._running[attempt.number] = attempt
            self._engine.post(attempt.number, attempt.ids, attempt.max_tokens, self._clock())

    def _forget(self, attempt: _Attempt) -> None:
        self._advance()  # the iteration was being computed until now
        if attempt in self._waiting:
            self._waiting.remove(attempt)
        elif self._running.pop(attempt.number, None) is not None:
            self._engine.stop(attempt.number)
        self._changed.set()
