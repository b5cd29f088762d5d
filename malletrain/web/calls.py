"""Requests to the daemon on behalf of viewers: in threads, with few connections, and one answer for
all who ask the same at the same time.
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

CONNECTIONS = 4
FRESH_S = 1.0
"""An answer is given to whoever asks the same within this time."""

T = TypeVar("T")


class Calls:
    """A few clients of one daemon. ``connect`` makes one; it may raise ClientError."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._idle: queue.LifoQueue[Connection] = queue.LifoQueue()
        self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="call")
        self._over = False
        self._shared: dict[Hashable, tuple[float, asyncio.Task[object]]] = {}

    async def ask(self, call: Callable[[Connection], T]) -> T:
        """What ``call`` makes of a client. Raises what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._one, call)

    async def shared(self, key: Hashable, call: Callable[[Connection], T]) -> T:
        """As :meth:`ask`; who asks with the same ``key`` within a second gets the same answer."""
        now = time.monotonic()
        self._shared = {
            k: (due, task)
            for k, (due, task) in self._shared.items()
            if due > now or not task.done()
        }
        if key not in self._shared:
            task = asyncio.ensure_future(self.ask(call))
            self._shared[key] = (now + FRESH_S, cast("asyncio.Task[object]", task))
        # One who goes away must not take the answer away from the others.
        return cast(T, await asyncio.shield(self._shared[key][1]))

    def close(self) -> None:
        """End the connections, those of calls that are under way when they are over."""
        self._over = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.renew()

    def renew(self) -> None:
        """Begin with new connections: the daemon was away, and may be somewhere else now."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()

    def _one(self, call: Callable[[Connection], T]) -> T:
        try:
            client = self._idle.get_nowait()
        except queue.Empty:
            client = self._connect()
        try:
            made = call(client)
        except ClientError as error:
            if error.code == "unreachable":
                client.close()
            else:
                self._rest(client)
            raise
        except BaseException:
            client.close()
            raise
        self._rest(client)
        return made

    def _rest(self, client: Connection) -> None:
        self._idle.put(client)
        if self._over:
            self.renew()
