"""A connection to one daemon for asyncio: many requests may be under way at once, on one socket.

What is asked: :mod:`malletrain.client.operations`.
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
from malletrain.client.address import Address
from malletrain.client.errors import UNAUTHENTICATED, ClientError
from malletrain.client.exchange import BROKEN, TIMEOUT_S
from malletrain.client.operations import Operation
from malletrain.protocol import messages

T = TypeVar("T")


class AsyncConnection:
    """A connection to one daemon, made at the first request. Use it within one event loop.

    Args:
        address: the daemon, and who asks.
        timeout_s: how long an answer may take, seconds.
    """

    def __init__(self, address: Address, timeout_s: float = TIMEOUT_S) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._monitor: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._requests: dict[str, tuple[asyncio.Future[messages.Reply], bool]] = {}
        self._connecting = asyncio.Lock()

    async def do(self, operation: Operation[T]) -> T:
        """Carry out one operation. Raises ClientError when the daemon refuses and Unreachable when
        there is none.
        """
        request = (operation.op, operation.params, operation.wait_s, operation.changes)
        try:
            data = await self._ask(*request)
        except ClientError as error:
            if error.code != UNAUTHENTICATED:
                raise
            await self._introduce(isinstance(error.data, dict) and error.data.get("munge") is True)
            data = await self._ask(*request)
        return operation.read(data, self.address.endpoint)

    async def _introduce(self, munge: bool) -> None:
        """Let MUNGE tell the daemon who this is."""
        credential, why = await asyncio.to_thread(self.address.credential, munge)
        if credential:
            try:
                await self._ask("login", {"credential": credential}, 0.0, False)
                return
            except ClientError as error:
                why = str(error)
        raise self.address.unknown_key(why)

    async def _ask(self, op: str, params: Mapping[str, Any], wait_s: float, changes: bool) -> Any:
        name, frames = exchange.request(op, params)
        socket = await self._connected()
        future: asyncio.Future[messages.Reply] = asyncio.get_running_loop().create_future()
        self._requests[name] = (future, changes)
        try:
            await socket.send_multipart(frames)
            answer = await asyncio.wait_for(future, self.timeout_s + wait_s)
        except asyncio.TimeoutError:
            raise exchange.no_answer(self.address, self.timeout_s, changes) from None
        finally:
            del self._requests[name]
        return exchange.data_of(answer)

    async def _connected(self) -> zmq.asyncio.Socket:
        """The socket after its handshake."""
        async with self._connecting:
            if self._socket is not None:
                return self._socket
            socket = self._context.socket(zmq.DEALER)
            handshake = exchange.Handshake(self.address)
            up, monitor = False, None
            try:
                monitor = exchange.set_up(socket, self.address)
                began = time.monotonic()
                while not up and not handshake.hopeless(time.monotonic() - began):
                    up = bool(await monitor.poll(100)) and handshake.advance(await _event(monitor))
            finally:
                if not up:
                    _close(socket, monitor)
            if not up or monitor is None:
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
            except ClientError as error:  # it does not say to which request
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
        self._drop()

    def _drop(self) -> None:
        """The next request connects anew."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if self._socket is not None:
            _close(self._socket, self._monitor)
        self._socket = self._monitor = None
        self._tasks = []

    async def close(self) -> None:
        """End the connection."""
        tasks = self._tasks
        self._drop()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)


def _close(socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket | None) -> None:
    socket.disable_monitor()
    socket.close(linger=0)
    if monitor is not None:
        monitor.close(linger=0)


async def _event(monitor: zmq.asyncio.Socket) -> int:
    message = await zmq.utils.monitor.recv_monitor_message(monitor)
    return message["event"]
