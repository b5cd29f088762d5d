"""The dispatcher in front of engines on the real clock: the smallest shell there is, with losses
and notices while answers are generated.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from llmserve.dispatcher import Dispatcher
from llmserve.engine_model import EngineTimes
from llmserve.generation import (
    DeliverTokens,
    EndRequest,
    FinishReason,
    GenerationRequest,
    PostAttempt,
    StopAttempt,
)
from llmserve.live_engine import LiveEngine
from llmserve.policies import FairServe
from llmserve.replicas import Capacity
from llmserve.states import RequestState

from tests.jobscripts.llm.engines import answer
from tests.waiting import PATIENCE_S

TIMES = EngineTimes(0.001, 0.0, 0.0, 0.0)
CAPACITY = Capacity(slots=4, kv_tokens=10_000)


class Shell:
    """Carries out the commands of a dispatcher."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher(FairServe())
        self.engines: dict[str, tuple[LiveEngine, asyncio.Task]] = {}
        self.attempts: dict[int, tuple[str, asyncio.Task]] = {}
        self.streams: dict[str, list[int]] = {}
        self.ends: dict[str, EndRequest] = {}
        self.changed = asyncio.Condition()

    def add(self, name: str) -> None:
        engine = LiveEngine(TIMES, CAPACITY)
        self.engines[name] = (engine, asyncio.create_task(engine.run()))
        self.dispatcher.add_replica(name, CAPACITY)
        self.carry_out(self.dispatcher.replica_loaded(name, time.monotonic()))

    def carry_out(self, commands) -> None:
        for command in commands:
            if isinstance(command, PostAttempt):
                task = asyncio.create_task(self._attempt(command))
                self.attempts[command.attempt] = (command.replica, task)
            elif isinstance(command, StopAttempt):
                self.attempts[command.attempt][1].cancel()
            elif isinstance(command, DeliverTokens):
                stream = self.streams.setdefault(command.request, [])
                assert command.first == len(stream)
                stream.extend(command.ids)
            else:
                self.ends[command.request] = command

    async def _attempt(self, post: PostAttempt) -> None:
        name, attempt = post.request.name, post.attempt
        engine, _ = self.engines[post.replica]
        try:
            async for report in engine.generate(post.ids, post.max_tokens):
                commands = self.dispatcher.tokens(name, attempt, report.ids, report.complete)
                self.carry_out(commands)
                if report.is_last:
                    now = time.monotonic()
                    self.carry_out(
                        self.dispatcher.finished(name, attempt, FinishReason.LENGTH, now)
                    )
                await self._notify()
        except asyncio.CancelledError:
            if post.replica in self.engines:
                self.carry_out(self.dispatcher.stopped(name, attempt, time.monotonic()))
            raise
        finally:
            del self.attempts[attempt]

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition) -> None:
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(condition), PATIENCE_S)

    def lose(self, name: str) -> None:
        """The node of a replica is gone, with what runs on it."""
        _, computing = self.engines.pop(name)
        computing.cancel()
        for replica, task in list(self.attempts.values()):
            if replica == name:
                task.cancel()
        self.carry_out(self.dispatcher.replica_gone(name, time.monotonic()))


@pytest.mark.parametrize("has_notice", [False, True])
def test_streams_survive_their_engines(has_notice):
    requests = [
        GenerationRequest(f"r{n}", f"u{n % 3}", (n, 7, 9), 300, stream=True) for n in range(12)
    ]

    async def serve() -> Shell:
        shell = Shell()
        shell.add("a")
        shell.add("b")
        for request in requests:
            shell.carry_out(shell.dispatcher.submit(request, time.monotonic()))
        await shell.until(lambda: sum(map(len, shell.streams.values())) > 200)
        shell.add("c")
        if has_notice:
            now = time.monotonic()
            shell.carry_out(shell.dispatcher.notice("a", now + 0.5, now))
            await shell.until(lambda: not any(r == "a" for r, _ in shell.attempts.values()))
        shell.lose("a")
        await shell.until(lambda: len(shell.ends) == len(requests))
        for _, computing in shell.engines.values():
            computing.cancel()
        return shell

    shell = asyncio.run(serve())
    for request in requests:
        assert shell.ends[request.name].state is RequestState.DONE
        assert tuple(shell.streams[request.name]) == answer(request)
    if has_notice:
        assert shell.dispatcher.losses == 0
        # A token that is on its way while its stream moves is computed again.
        assert shell.dispatcher.repeated_tokens <= shell.dispatcher.moves
    else:
        assert shell.dispatcher.losses > 0
