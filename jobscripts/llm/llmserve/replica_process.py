"""One replica as a process of a service: runs an engine and its front, and reports to the members.

The process joins the service before its engine loads, so that dispatchers know of it. The members
take turns in loading. When the model is loaded, the process measures its throughput and reports
that it is ready: the time since its start is the start cost that ``malletrain submit --start-cost
auto`` measures. An engine that ends is started again. If it ends :data:`MAX_LOADS` times in a row
before it has loaded, the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from llmserve.credentials import bearer_token
from llmserve.engine_cache import cache_tokens
from llmserve.engine_process import EngineProcess
from llmserve.engines import engine_command
from llmserve.front import Front, listen
from llmserve.measuring import measure_throughput
from llmserve.replica_client import (
    UNIX,
    EngineCrash,
    EngineRefusal,
    ReplicaClient,
    ReplicaUnreachable,
)
from llmserve.replica_life import LIFE_TRANSITIONS, LifeEvent, may_load
from llmserve.replica_status import ReplicaStatus
from llmserve.states import ReplicaState
from malletrain import membership
from malletrain.waits import happens

log = logging.getLogger("llmserve")

MAX_LOADS = 3
"""Number of times in a row that an engine may end before it has loaded."""
RESTART_PAUSE_S = 1.0
"""Pause before an engine is started again, seconds, times the number of consecutive failures to
load.
"""
HEALTH_POLL_S = 0.1
UNWELL_ANSWERS = 2
"""Number of consecutive unhealthy answers after which an engine is ended."""
HEALTH_WATCH_S = 5.0
"""Interval of the health checks of an engine that has loaded, seconds."""
VIEW_POLL_S = 0.5
BROKEN_S = 2.0
"""Time to wait for the end of an engine after a connection to it broke, seconds."""
QUIET_S = 1.5
"""Time without a request after which a replica that leaves is drained, seconds. Dispatchers request
the status more often than that."""
DEFAULT_KV_TOKENS = 65_536
"""Maximum number of tokens of an engine that does not report the size of its KV cache."""
MAX_STAGGER_S = 900.0
"""Maximum time for which a replica waits for its turn to load, seconds."""


class EngineNeverLoads(Exception):
    """The engine ended each time before it had loaded; the text has its last lines."""


@dataclass(frozen=True)
class ReplicaOptions:
    """How a replica serves."""

    command: tuple[str, ...]
    """Command of the engine, with the fields of :func:`llmserve.engines.engine_command`."""
    model: str
    """Path or name of the model."""
    name: str
    """Name of the model in requests."""
    slots: int
    """Maximum number of concurrent requests."""
    kv_tokens: int | None = None
    """Maximum number of tokens of all of them; None: the size of the engine's KV cache."""
    port: int = 0
    """Port of the front; 0: any."""
    loads_at_once: int = 4
    """Maximum number of replicas of the service that load at the same time."""


class ReplicaProcess:
    """The replica of this process. Use it as an asynchronous context manager; :meth:`run` serves.

    Args:
        options: how it serves.

    Raises:
        ValueError: the command of the engine has no ``{socket}``.
    """

    def __init__(self, options: ReplicaOptions) -> None:
        self.options = options
        self.state = ReplicaState.LOADING
        self.load_s: float | None = None
        """Seconds that the engine took to load, the last time."""
        self.throughput: dict[int, float] = {}
        """Number of requests at once → tokens per second."""
        self.cache_tokens: int | None = None
        """Number of tokens that the engine's KV cache holds; None if the engine does not report it.
        """
        self.sentence = ""
        """Why the engine ended the last time."""
        engine_command(options.command, {})  # raises before the folder is created
        self._folder = Path(tempfile.mkdtemp(prefix="llmserve-"))
        socket_path = self._folder / "engine.sock"
        self._words = command_of(options, socket_path)
        self._engine = EngineProcess(self._words, socket_path)
        self._client: ReplicaClient | None = None
        self._front: Front | None = None
        self._is_loaded = asyncio.Event()
        self._has_crashed = asyncio.Event()
        """Set from the time at which the engine ended by itself until it is started again."""
        self._ends_at = math.inf
        self._drainer: asyncio.Task[None] | None = None
        self._has_reported_ready = False
        self.address = ""
        """Address of the front."""
        self.group: membership.Membership

    async def __aenter__(self) -> ReplicaProcess:
        """Bind the front and join.

        Raises:
            OSError: the port cannot be opened.
            MembershipError: MalleTrain's launcher cannot be reached.
        """
        try:
            host = socket.gethostbyname(membership.host())
            listener = listen(host, self.options.port)
            self.address = f"{host}:{listener.getsockname()[1]}"
            token = bearer_token(membership.job_key())
            self._front = Front(
                token, self._engine.socket, self.status, self._engine_ended, self._end_engine
            )
            await self._front.start(listener)
            self._client = ReplicaClient(f"{UNIX}{self._engine.socket}")
            self.group = membership.join(self.address, ready=False)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._change(LifeEvent.END)
        await self._close()

    async def run(self) -> None:
        """Serve until it is cancelled.

        Raises:
            EngineNeverLoads: the engine does not start.
        """
        follower = asyncio.create_task(self._follow())
        try:
            await self._keep_engine()
        finally:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)

    def status(self) -> ReplicaStatus:
        """Return the status of the replica."""
        slots = self.options.slots
        total = self.throughput.get(slots, 0.0)
        ends = None if math.isinf(self._ends_at) else max(0.0, self._ends_at - time.monotonic())
        return ReplicaStatus(
            state=self.state.value,
            model=self.options.name,
            slots=slots,
            kv_tokens=self.kv_tokens,
            token_s=slots / total if total > 0 else 0.0,
            ends_in_s=ends,
            load_s=self.load_s,
            tokens_per_s=self.throughput,
            sentence=self.sentence if self.state is ReplicaState.FAILED else "",
        )

    @property
    def kv_tokens(self) -> int:
        """Maximum number of tokens of all concurrent requests together."""
        limits = [n for n in (self.options.kv_tokens, self.cache_tokens) if n is not None]
        return min(limits, default=DEFAULT_KV_TOKENS)

    # --- the engine ---

    async def _keep_engine(self) -> None:
        failures = 0
        await self._wait_for_turn()
        while True:
            has_loaded = await self._run_engine()
            failures = 0 if has_loaded else failures + 1
            if failures >= MAX_LOADS:
                raise EngineNeverLoads(self.sentence)
            await asyncio.sleep(RESTART_PAUSE_S * failures)
            self._change(LifeEvent.RESTART)

    async def _run_engine(self) -> bool:
        """Run the engine once, until it ends. Return whether it had loaded."""
        self._is_loaded.clear()
        started = time.monotonic()
        try:
            await self._engine.start()
        except OSError as error:
            self.sentence = f"The engine cannot be started: {self._words[0]}: {error.strerror}."
            self._change(LifeEvent.CRASH)
            return False
        loader = asyncio.create_task(self._watch(started))
        try:
            self.sentence = await self._engine.wait()
        finally:
            loader.cancel()
            await asyncio.gather(loader, return_exceptions=True)
        log.error("%s", self.sentence)
        if self.state is not ReplicaState.FAILED:
            self._change(LifeEvent.CRASH)
        return self._is_loaded.is_set()

    async def _load(self, started: float) -> None:
        """Wait until the engine has loaded, measure its throughput, and report that it is ready."""
        assert self._client is not None
        while not await self._is_healthy():  # noqa: ASYNC110 - another process
            await asyncio.sleep(HEALTH_POLL_S)
        self.load_s = time.monotonic() - started
        self.cache_tokens = await self._read_cache()
        if not self.throughput:
            await self._measure()
        self._is_loaded.set()
        self._change(LifeEvent.LOAD)
        if not self._has_reported_ready:
            self._has_reported_ready = True
            self.group.report_ready()
        rates = ", ".join(f"{size}: {rate:.0f}" for size, rate in self.throughput.items())
        print(
            f"loaded {self.options.name} in {self.load_s:.1f} s; tokens/s by concurrent requests: "
            f"{rates or 'not measured'}; maximum tokens of concurrent requests: {self.kv_tokens}; "
            f"serving at {self.address}",
            flush=True,
        )

    async def _watch(self, started: float) -> None:
        """Wait until the engine has loaded, then end it when it becomes unhealthy. An engine that
        is too busy to answer continues.
        """
        assert self._client is not None
        await self._load(started)
        in_a_row = 0
        while True:
            await asyncio.sleep(HEALTH_WATCH_S)
            with contextlib.suppress(ReplicaUnreachable):
                in_a_row = 0 if await self._client.is_healthy() else in_a_row + 1
            if in_a_row == UNWELL_ANSWERS:
                self._end_engine()

    async def _measure(self) -> None:
        assert self._client is not None
        try:
            self.throughput = await measure_throughput(
                self._client, self.options.name, self.options.slots
            )
        except (EngineRefusal, EngineCrash, ReplicaUnreachable) as error:
            print(f"the throughput was not measured: {error}", file=sys.stderr, flush=True)

    async def _read_cache(self) -> int | None:
        assert self._client is not None
        try:
            return cache_tokens(await self._client.metrics(), self.options.slots)
        except ReplicaUnreachable:
            return None

    async def _is_healthy(self) -> bool:
        assert self._client is not None
        try:
            return await self._client.is_healthy()
        except ReplicaUnreachable:
            return False

    async def _engine_ended(self) -> str:
        """Return for the front why a connection to the engine broke."""
        return self.sentence if await happens(self._has_crashed, BROKEN_S) else ""

    def _end_engine(self) -> str:
        """End an unhealthy engine. Return the error and, once it has ended, its last lines; empty
        if it has not loaded, in which case it continues.
        """
        if not self._is_loaded.is_set():
            return ""
        if self.state in (ReplicaState.READY, ReplicaState.DRAINING):
            self.sentence = "The engine reports that it is unhealthy. It is started again."
            self._change(LifeEvent.CRASH)
            self._engine.kill()
        return self.sentence

    # --- the members ---

    async def _wait_for_turn(self) -> None:
        """Wait until few enough of the earlier members are loading."""
        await first_view(self.group)
        end = time.monotonic() + MAX_STAGGER_S
        while time.monotonic() < end:
            if may_load(self.group.members, self.group.me, self.options.loads_at_once):
                return
            await asyncio.sleep(HEALTH_POLL_S)

    async def _follow(self) -> None:
        async for change in self.group.watch():
            if change.member != self.group.me:
                continue
            if change.kind == membership.LEAVING:
                self._ends_at = time.monotonic() + self.group.me.seconds_left
                self._change(LifeEvent.NOTICE)
                self._drainer = asyncio.create_task(self._drain())
            elif change.kind == membership.STAYING:
                self._ends_at = math.inf
                if self._drainer is not None:
                    self._drainer.cancel()
                self._change(LifeEvent.STAY)
                if self._is_loaded.is_set() and self.state is ReplicaState.LOADING:
                    self._change(LifeEvent.LOAD)

    async def _drain(self) -> None:
        """Report that this replica is drained, once the dispatchers have moved all requests."""
        assert self._front is not None
        quiet_s = 0.0
        while quiet_s < QUIET_S:
            await asyncio.sleep(HEALTH_POLL_S)
            quiet_s = 0.0 if self._front.running else quiet_s + HEALTH_POLL_S
        self.group.report_drained()

    def _change(self, event: LifeEvent) -> None:
        self.state = LIFE_TRANSITIONS[self.state, event]
        if event is LifeEvent.CRASH:
            self._has_crashed.set()
        elif event is LifeEvent.RESTART:
            self._has_crashed.clear()

    async def _close(self) -> None:
        if self._drainer is not None:
            self._drainer.cancel()
        await self._engine.stop()
        if self._client is not None:
            await self._client.close()
        if self._front is not None:
            await self._front.close()
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder)


def command_of(options: ReplicaOptions, engine_socket: Path) -> list[str]:
    """Return the command of the engine on this node.

    Args:
        options: the options of the replica.
        engine_socket: path of the socket on which the engine must listen.

    Raises:
        ValueError: the command has no ``{socket}``.
    """
    fields = {
        "socket": str(engine_socket),
        "model": options.model,
        "name": options.name,
        "slots": str(options.slots),
        "kv_tokens": str(options.kv_tokens or DEFAULT_KV_TOKENS),
        "gpus": str(max(1, membership.gpu_count())),
        "python": sys.executable,
    }
    return engine_command(options.command, fields)


async def first_view(group: membership.Membership) -> None:
    """Wait until the members are known, in short steps, because a thread cannot be cancelled."""
    while not await asyncio.to_thread(group.wait, VIEW_POLL_S):  # noqa: ASYNC110 - a thread's
        await asyncio.sleep(VIEW_POLL_S)
