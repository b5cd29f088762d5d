"""A connection to one daemon for asyncio: many simultaneous requests on one socket.

The operations are in :mod:`malletrain.client.operations`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import zmq
import zmq.asyncio
import zmq.utils.monitor

from malletrain.client import exchange
from malletrain.client.errors import UNAUTHENTICATED, ClientError
from malletrain.client.exchange import BROKEN, TIMEOUT_S, Address
from malletrain.client.operations import Operation
from malletrain.protocol import messages
from malletrain.protocol.open_sockets import OpenSockets
from malletrain.waits import time_limit

T = TypeVar("T")


class AsyncConnection:
    """A connection to one daemon, established at the first request. Use it within one event loop.

    Args:
        address: the daemon, and this client's keys.
        timeout_s: maximum time for an answer, seconds.
    """

    def __init__(self, address: Address, timeout_s: float = TIMEOUT_S) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._context = zmq.asyncio.Context()
        self._open = OpenSockets(self, self._context)
        self._socket: zmq.asyncio.Socket | None = None
        self._monitor: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._requests: dict[str, tuple[asyncio.Future[messages.Reply], bool]] = {}
        self._connecting = asyncio.Lock()

    async def do(self, operation: Operation[T]) -> T:
        """Carry out one operation. Raises ClientError if the daemon refuses and Unreachable if
        there is none.
        """
        request = (operation.op, operation.params, operation.wait_s, operation.changes)
        try:
            data = await self._request(*request)
        except ClientError as error:
            if error.code != UNAUTHENTICATED:
                raise
            await self._log_in(isinstance(error.data, dict) and error.data.get("munge") is True)
            data = await self._request(*request)
        return operation.read(data, self.address.endpoint)

    async def _log_in(self, munge: bool) -> None:
        """Log in with a MUNGE credential."""
        credential, why = await asyncio.to_thread(self.address.credential, munge)
        if credential:
            try:
                await self._request("login", {"credential": credential}, 0.0, False)
                return
            except ClientError as error:
                why = str(error)
        raise self.address.unknown_key(why)

    async def _request(
        self, op: str, params: Mapping[str, Any], wait_s: float, changes: bool
    ) -> Any:
        name, frames = exchange.request(op, params)
        socket = await self._connect()
        future: asyncio.Future[messages.Reply] = asyncio.get_running_loop().create_future()
        self._requests[name] = (future, changes)
        timeout_s = self.timeout_s + wait_s
        try:
            await socket.send_multipart(frames)
            async with time_limit(timeout_s):
                answer = await future
        except asyncio.TimeoutError:
            raise exchange.no_answer(self.address, timeout_s, changes) from None
        finally:
            del self._requests[name]
        return exchange.data_of(answer)

    async def _connect(self) -> zmq.asyncio.Socket:
        """Return the socket after its handshake."""
        async with self._connecting:
            if self._socket is not None:
                return self._socket
            socket = self._context.socket(zmq.DEALER)
            self._open.add(socket)
            handshake = exchange.Handshake(self.address)
            is_up, monitor = False, None
            try:
                monitor = exchange.set_up(socket, self.address)
                self._open.add(monitor)
                started = time.monotonic()
                while not is_up and not handshake.is_hopeless(time.monotonic() - started):
                    is_up = bool(await monitor.poll(100)) and handshake.advance(
                        await _event(monitor)
                    )
            finally:
                if not is_up:
                    self._open.disconnect()
            if not is_up or monitor is None:
                raise exchange.not_running(self.address)
            self._socket, self._monitor = socket, monitor
            loop = asyncio.get_running_loop()
            self._tasks = [
                loop.create_task(self._receive(socket)),
                loop.create_task(self._watch(monitor)),
            ]
            return socket

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            try:
                answer = exchange.reply(await socket.recv_multipart(), self.address)
            except ClientError as error:  # the error does not name its request
                for future, _ in self._requests.values():
                    if not future.done():
                        future.set_exception(error)
                continue
            if answer is not None and answer.id in self._requests:
                future, _ = self._requests[answer.id]
                if not future.done():
                    future.set_result(answer)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while await _event(monitor) not in BROKEN:
            pass
        for future, changes in self._requests.values():
            if not future.done():
                future.set_exception(exchange.went_away(self.address, changes))
        self._disconnect()

    def _disconnect(self) -> None:
        """Close the socket; the next request connects again."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._open.disconnect()
        self._socket = self._monitor = None
        self._tasks = []

    async def close(self) -> None:
        """End the connection."""
        tasks = self._tasks
        self._disconnect()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        self._open.close()


async def _event(monitor: zmq.asyncio.Socket) -> int:
    message = await zmq.utils.monitor.recv_monitor_message(monitor)
    return message["event"]
