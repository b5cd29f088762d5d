"""Simulated engines in the loop of a test, and their answers. An engine can be lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import uvicorn
from llmserve.engine_model import EngineTimes
from llmserve.generation import GenerationRequest
from llmserve.live_engine import LiveEngine
from llmserve.replicas import Capacity
from llmserve.simulated_model import detokenize, digest_of, generate
from llmserve.simulated_server import listen, make_app

from tests.waiting import PATIENCE_S

TIMES = EngineTimes(0.001, 0.0, 0.0, 0.0)
PAUSE_S = 0.002


class HandClock:
    """The clock of simulated engines, seconds. It stands still until it is started: what is done to
    an engine meanwhile finds it at the same token, however long it takes.
    """

    def __init__(self) -> None:
        self._ahead_s = 0.0
        self._started_at: float | None = None

    def __call__(self) -> float:
        if self._started_at is None:
            return self._ahead_s
        return self._ahead_s + time.monotonic() - self._started_at

    def move(self, seconds: float) -> None:
        """Move it on while it stands still."""
        self._ahead_s += seconds

    def start(self) -> None:
        """Let it run from now on."""
        self._started_at = time.monotonic()


async def until_async(condition: Callable[[], object], what: str) -> None:
    """Wait in the loop until a condition holds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + PATIENCE_S
    while not condition():
        assert loop.time() < end, f"not within {PATIENCE_S} s: {what}"
        await asyncio.sleep(PAUSE_S)


def text_of(request: GenerationRequest) -> str:
    """The text of an undisturbed answer."""
    return detokenize(generate(digest_of(request.prompt), request.max_tokens)[0])


class _Server(uvicorn.Server):
    """One of several in a process, whose signals are the test's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class LocalEngine:
    """One simulated engine on a Unix socket."""

    def __init__(
        self,
        path: Path,
        capacity: Capacity,
        load_s: float = 0.0,
        times: EngineTimes = TIMES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.capacity, self.load_s = path, capacity, load_s
        self.engine = LiveEngine(times, capacity, clock)
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return f"unix:{self.path}"

    async def start(self) -> None:
        app = make_app(self.engine, "simulated", self.load_s)
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=0)
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve([listen(self.path)]))
        await until_async(lambda: self._server.started or self._task.done(), "the engine listens")

    async def lose(self) -> None:
        """Lose its node: connections break, new ones are refused."""
        if self._server is None:
            return
        server, self._server = self._server, None
        self.path.unlink()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        server.should_exit = server.force_exit = True
        await self._task


@contextlib.asynccontextmanager
async def engines(
    folder: Path,
    number: int = 1,
    slots: int = 8,
    kv_tokens: int = 100_000,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[list[LocalEngine]]:
    """Yield this number of started engines."""
    made = [
        LocalEngine(folder / f"e{index}", Capacity(slots, kv_tokens), clock=clock)
        for index in range(number)
    ]
    for engine in made:
        await engine.start()
    try:
        yield made
    finally:
        for engine in made:
            await engine.lose()
