"""A command on a node of a job, as its client sees it: started, fed, read and ended through the
daemon.

Decides how often the daemon is asked, and keeps the command alive while its output is not read.
:mod:`malletrain.cli.exec` connects it to a terminal.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from typing import Any

import msgspec

from malletrain.client.aio import AsyncConnection
from malletrain.client.operations import Operation
from malletrain.protocol.commands import MAX_CHUNK_BYTES, Terminal
from malletrain.protocol.views import CommandPart, CommandStarted, CommandView

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
