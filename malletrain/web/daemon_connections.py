"""Runs requests of web viewers to the daemon in threads, over a few connections. Equal requests at
the same time share one answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

from malletrain.client import ClientError, Connection

MAX_CONNECTIONS = 4
"""Maximum number of connections to the daemon."""
CACHE_TTL_S = 1.0
"""Time for which an answer is reused for equal requests, seconds."""

T = TypeVar("T")


class ConnectionPool:
    """Pool of connections to one daemon. ``connect`` opens one and may raise ClientError."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._idle: queue.LifoQueue[Connection] = queue.LifoQueue()
        self._pool = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="call")
        self._closed = False
        self._cache: dict[Hashable, tuple[float, asyncio.Task[object]]] = {}

    async def run(self, call: Callable[[Connection], T]) -> T:
        """Run ``call`` in a thread with a connection, and return its result. Its exceptions
        propagate.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, self._run_in_thread, call
        )

    async def run_cached(self, key: Hashable, call: Callable[[Connection], T]) -> T:
        """Like :meth:`run`, but calls with the same ``key`` within CACHE_TTL_S share one result."""
        now = time.monotonic()
        self._cache = {
            k: (expires_at, task)
            for k, (expires_at, task) in self._cache.items()
            if expires_at > now or not task.done()
        }
        if key not in self._cache:
            task = asyncio.ensure_future(self.run(call))
            self._cache[key] = (now + CACHE_TTL_S, cast("asyncio.Task[object]", task))
        # A caller that is cancelled must not cancel the call for the others.
        return cast(T, await asyncio.shield(self._cache[key][1]))

    def close(self) -> None:
        """Close all connections. Those in use are closed when their call ends."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.close_idle()

    def close_idle(self) -> None:
        """Close all idle connections, because the daemon was unreachable and may have moved. Later
        calls open new ones.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()

    def _run_in_thread(self, call: Callable[[Connection], T]) -> T:
        try:
            connection = self._idle.get_nowait()
        except queue.Empty:
            connection = self._connect()
        try:
            result = call(connection)
        except ClientError as error:
            if error.code == "unreachable":
                connection.close()
            else:
                self._release(connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._release(connection)
        return result

    def _release(self, connection: Connection) -> None:
        self._idle.put(connection)
        if self._closed:
            self.close_idle()
