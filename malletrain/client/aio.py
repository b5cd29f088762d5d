"""A connection to one daemon for asyncio: many simultaneous requests on one socket. And a command
on a node of a job that runs over it, as its client sees it: started, fed, read and ended through
the daemon.

The operations are in :mod:`malletrain.client.operations`. :class:`RemoteCommand` decides how often
the daemon is asked, and keeps the command alive while its output is not read.
:mod:`malletrain.cli.exec` connects it to a terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio
import zmq.utils.monitor

from malletrain.client import exchange
from malletrain.client.errors import UNAUTHENTICATED, ClientError
from malletrain.client.exchange import BROKEN, TIMEOUT_S, Address
from malletrain.client.operations import Operation
from malletrain.protocol import messages
from malletrain.protocol.commands import MAX_CHUNK_BYTES, Terminal
from malletrain.protocol.open_sockets import OpenSockets
from malletrain.protocol.views import CommandPart, CommandStarted, CommandView
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


WAIT_S = 10.0
"""Time for which the daemon is asked to wait for output, or for room for input, seconds."""
KEEP_ALIVE_S = 15.0
"""Interval of requests while output is being written, seconds. Without requests, the daemon ends
the command.
"""


class RemoteCommand:
    """One command. Every method raises ClientError if the daemon refuses, and Unreachable if none
    answers. Create it with :meth:`start`.

    Args:
        connection: connection to the daemon.
        started: the answer to the start.
    """

    def __init__(self, connection: AsyncConnection, started: CommandStarted) -> None:
        self.started = started
        """The job and the node of the command."""
        self._connection = connection
        self._cursor = self._offset = 0

    @classmethod
    async def start(
        cls,
        connection: AsyncConnection,
        job: str,
        argv: Sequence[str],
        *,
        node: str = "",
        rank: int | None = None,
        terminal: Terminal | None = None,
    ) -> RemoteCommand:
        """Start a command.

        Args:
            connection: connection to the daemon.
            job: id or name of the job.
            argv: the command line.
            node: name of a node of the job; empty for the node of ``rank``.
            rank: rank of a worker; None for rank 0.
            terminal: run it in a pseudo-terminal; None: with three pipes.
        """
        params = {
            "job": job,
            "argv": list(argv),
            "node": node,
            "rank": rank,
            "terminal": msgspec.to_builtins(terminal),
        }
        operation: Operation[CommandStarted] = Operation(
            "command-start", CommandStarted, params, changes=True
        )
        return cls(connection, await connection.do(operation))

    async def read(self, write: Callable[[CommandPart], Awaitable[None]]) -> CommandView:
        """Pass all output to ``write``, in order, until the command ends. Return its end."""
        while True:
            view = await self._output(WAIT_S)
            for part in view.parts:
                await self._alive_while(write(part))
            self._cursor = view.cursor
            if view.ended:
                return view

    async def feed(self, source: AsyncIterable[bytes]) -> None:
        """Forward ``source`` to the standard input of the command, then its end."""
        async for data in source:
            for begin in range(0, len(data), MAX_CHUNK_BYTES):
                await self._forward(data[begin : begin + MAX_CHUNK_BYTES], end=False)
        await self._forward(b"", end=True)

    async def resize(self, terminal: Terminal) -> None:
        """Set the size of the command's terminal."""
        await self._do("command-resize", terminal=msgspec.to_builtins(terminal))

    async def signal(self, signum: int) -> None:
        """Send a signal to the processes of the command."""
        await self._do("command-signal", signum=signum)

    async def end(self) -> None:
        """Forget the command. If it has not ended, it is killed."""
        await self._do("command-end")

    async def _output(self, wait_s: float) -> CommandView:
        params = {"command": self.started.command, "cursor": self._cursor, "wait_s": wait_s}
        return await self._connection.do(
            Operation("command-output", CommandView, params, wait_s=wait_s)
        )

    async def _alive_while(self, work: Awaitable[None]) -> None:
        """Wait for ``work``, and tell the daemon meanwhile that this client is there."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=KEEP_ALIVE_S))[0]:
                await self._output(0.0)
            task.result()
        finally:
            task.cancel()

    async def _forward(self, data: bytes, end: bool) -> None:
        while True:
            accepted: int = await self._do(
                "command-input", WAIT_S, offset=self._offset, data=data, end=end
            )
            taken = max(0, accepted - self._offset)
            data, self._offset = data[taken:], self._offset + taken
            if not data:
                return

    async def _do(self, op: str, wait_s: float = 0.0, **params: Any) -> Any:
        params |= {"command": self.started.command, "wait_s": wait_s}
        operation: Operation[Any] = Operation(op, Any, params, wait_s=wait_s, changes=True)
        return await self._connection.do(operation)
