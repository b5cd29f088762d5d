"""The simulated engine, which generates a token a second after its first answers, until a file is
there: a batch does not end before what a test does to it.
``FILE [options of the simulated server]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from llmserve import simulated_server
from llmserve.engine_model import EngineReport
from llmserve.live_engine import LiveEngine

QUICK_ANSWERS = 21
"""Number of answers of each engine that are not held up."""
_LOOK_S = 0.05
_HELD_UP_S = 1.0
"""How long each further token is held up, seconds."""


class Gate:
    """The file. One task looks for it, however many answers wait."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    async def wait(self, limit_s: float) -> None:
        """Wait until the file is there, at most this long."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._look())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._open.wait(), limit_s)

    async def _look(self) -> None:
        while not self._path.exists():  # noqa: ASYNC110 (another process makes it)
            await asyncio.sleep(_LOOK_S)
        self._open.set()


GATE = Gate(Path(sys.argv[1]))


class GatedEngine(LiveEngine):
    answers = 0

    async def generate(
        self, ids: Sequence[int], max_tokens: int
    ) -> AsyncGenerator[EngineReport, None]:
        async for report in super().generate(ids, max_tokens):
            if self.answers >= QUICK_ANSWERS:
                await GATE.wait(_HELD_UP_S)
            yield report
        self.answers += 1


simulated_server.LiveEngine = GatedEngine
simulated_server.main(sys.argv[2:])
