"""The simulated engine, which generates a token a second after its first answers, until a file is
there: a batch does not end before what a test does to it.
``FILE [options of the simulated server]``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from llmserve import simulated_server
from llmserve.engine_model import EngineReport
from llmserve.live_engine import LiveEngine

QUICK_ANSWERS = 21
"""Number of answers of each engine that are not held up."""
_LOOK_S = 0.05
_LOOKS = 20


async def is_open() -> bool:
    return await asyncio.to_thread(Path(sys.argv[1]).exists)


class GatedEngine(LiveEngine):
    answers = 0

    async def generate(
        self, ids: Sequence[int], max_tokens: int
    ) -> AsyncGenerator[EngineReport, None]:
        async for report in super().generate(ids, max_tokens):
            for _ in range(_LOOKS):
                if self.answers < QUICK_ANSWERS or await is_open():
                    break
                await asyncio.sleep(_LOOK_S)
            yield report
        self.answers += 1


simulated_server.LiveEngine = GatedEngine
simulated_server.main(sys.argv[2:])
