"""How a client waits: for answers of the daemon, for time and for disks.

The coroutines of :mod:`malletrain.api.aio` wait by a :class:`ClientSession` only. With an
:class:`AioSession` they wait in an event loop. With a :class:`BlockingSession` they block their
thread, and :func:`finish` runs them without a loop: so :class:`malletrain.Client` runs the
coroutines of :class:`malletrain.AsyncClient`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from malletrain.client import Connection, Unreachable
from malletrain.client.aio import AsyncConnection
from malletrain.client.exchange import find
from malletrain.client.operations import Operation
from malletrain.protocol import env

T = TypeVar("T")


class ClientSession(Protocol):
    """How a client waits."""

    async def do(self, operation: Operation[T]) -> T:
        """Carry out one operation of :mod:`malletrain.client.operations`."""

    async def sleep(self, seconds: float) -> None:
        """Wait for a time, seconds."""

    async def run(self, function: Callable[..., T], /, *args: Any) -> T:
        """Call a function that reads or writes files, and return its result."""

    async def close(self) -> None:
        """End all connections."""


def place_of(state_dir: str | os.PathLike[str] | None) -> Path | None:
    """Return the state directory of the daemon; None: your own daemon, else the site's."""
    place = os.fspath(state_dir) if state_dir else os.environ.get(env.STATE_DIR)
    return Path(place) if place else None


class AioSession:
    """Waits in one event loop: one connection for all requests.

    Args:
        state_dir: state directory of the daemon; None: your own daemon, else the site's.
        timeout_s: maximum time for an answer, seconds.

    Raises:
        malletrain.client.Unreachable: there is no daemon.
    """

    def __init__(self, state_dir: Path | None, timeout_s: float) -> None:
        self._state_dir = state_dir
        self._connection = AsyncConnection(find(state_dir), timeout_s)

    async def do(self, operation: Operation[T]) -> T:
        """Carry out one operation."""
        try:
            return await self._connection.do(operation)
        except Unreachable:  # after a restart it may be at another address
            with contextlib.suppress(Unreachable):
                self._connection.address = find(self._state_dir)
            raise

    async def sleep(self, seconds: float) -> None:
        """Wait for a time, seconds."""
        await asyncio.sleep(seconds)

    async def run(self, function: Callable[..., T], /, *args: Any) -> T:
        """Call a function in a thread of its own."""
        return await asyncio.to_thread(function, *args)

    async def close(self) -> None:
        """End the connection."""
        await self._connection.close()


class BlockingSession:
    """Waits by blocking the thread. May be used from several threads: each has a connection of its
    own.

    Args:
        connect: returns a new connection to the daemon. Called for the first one at once.

    Raises:
        malletrain.client.Unreachable: there is no daemon.
    """

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._local = threading.local()
        self._lock = threading.Lock()
        self._open: list[Connection] = []
        self._connection()

    def _connection(self) -> Connection:
        """Return this thread's connection."""
        connection: Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect()
            with self._lock:
                self._open.append(connection)
        return connection

    async def do(self, operation: Operation[T]) -> T:
        """Carry out one operation."""
        connection = self._connection()
        try:
            return connection.do(operation)
        except Unreachable:  # after a restart it may be at another address
            self._forget(connection)
            raise

    def _forget(self, connection: Connection) -> None:
        """Close the connection, so that this thread's next call looks for the daemon again."""
        self._local.connection = None
        with self._lock:
            if connection in self._open:
                self._open.remove(connection)
        connection.close()

    async def sleep(self, seconds: float) -> None:
        """Wait for a time, seconds."""
        time.sleep(seconds)  # noqa: ASYNC251

    async def run(self, function: Callable[..., T], /, *args: Any) -> T:
        """Call a function."""
        return function(*args)

    async def close(self) -> None:
        """End the connections of all threads."""
        with self._lock:
            for connection in self._open:
                connection.close()
            self._open.clear()
        self._local = threading.local()


def finish(awaitable: Awaitable[T]) -> T:
    """Run a coroutine that waits by a :class:`BlockingSession`; return its result.

    Raises:
        RuntimeError: it waits by something else.
    """
    steps = awaitable.__await__()
    try:
        next(steps)
    except StopIteration as end:
        result: T = end.value
        return result
    steps.close()
    raise RuntimeError("The coroutine waits for an event loop, and there is none.")
