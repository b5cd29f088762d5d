"""The simulated engine, of whose first run a long answer stands still after a few tokens, however
much time passes. ``FILE [options of the simulated server]``; the file is there from the first run
on.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

from llmserve import simulated_server
from llmserve.engine_model import EngineReport
from llmserve.live_engine import LiveEngine

LONG_TOKENS = 100
"""``max_tokens`` of a request whose answer stands still."""
GENERATED_TOKENS = 10
"""Number of tokens that it gets."""


class StandingEngine(LiveEngine):
    async def generate(
        self, ids: Sequence[int], max_tokens: int
    ) -> AsyncGenerator[EngineReport, None]:
        stands = max_tokens >= LONG_TOKENS
        count = GENERATED_TOKENS if stands else max_tokens
        async for report in super().generate(ids, count):
            yield replace(report, is_last=False) if stands else report
        if stands:
            await asyncio.Event().wait()


if not Path(sys.argv[1]).exists():
    Path(sys.argv[1]).touch()
    simulated_server.LiveEngine = StandingEngine
simulated_server.main(sys.argv[2:])
