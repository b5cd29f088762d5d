"""A proxy between a daemon and its peers, on which connections can be cut, delayed and left
half-open. The caller decides when.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: closing resets the connection (socket(7))."""


class Way:
    """Forwards everything that arrives at ``(outer, port)`` to ``(inner, port)``, in a thread of
    its own.
    """

    def __init__(self, outer: str, inner: str, port: int) -> None:
        self._outer, self._inner, self._port = outer, inner, port
        self._loop = asyncio.new_event_loop()
        self._delay_s = 0.0
        self._speaks = asyncio.Event()
        self._speaks.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        listening = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listening,))
        self._thread.start()
        if not listening.wait(30):
            raise OSError(f"Nobody listens at {outer}:{port}.")

    def cut(self) -> None:
        """Reset every connection."""
        self._in_loop(self._reset)

    def delay(self, seconds: float) -> None:
        """Forward everything that arrives from now on with this delay."""
        self._in_loop(lambda: setattr(self, "_delay_s", seconds))

    def half_open(self, silent: bool) -> None:
        """Stop forwarding without closing connections. At the end of the block the connections are
        reset, because their data are lost.
        """

        def change() -> None:
            if silent:
                self._speaks.clear()
            else:
                self._reset()
                self._speaks.set()

        self._in_loop(change)

    def close(self) -> None:
        """Close the proxy."""
        self._in_loop(self._loop.stop)
        self._thread.join()

    def _in_loop(self, call: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(call)

    def _run(self, listening: threading.Event) -> None:
        loop = self._loop
        server = loop.run_until_complete(
            asyncio.start_server(self._passes, self._outer, self._port, reuse_address=True)
        )
        listening.set()
        try:
            loop.run_forever()
        finally:
            server.close()
            self._reset()
            loop.run_until_complete(self._ended())
            loop.close()

    async def _ended(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _reset(self) -> None:
        for writer in list(self._open):
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, RESET
                )
            writer.transport.abort()
        self._open.clear()

    async def _passes(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            far_reader, far_writer = await asyncio.open_connection(self._inner, self._port)
        except OSError:
            writer.transport.abort()
            self._tasks.discard(task)
            return
        self._open |= {writer, far_writer}
        try:
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
        finally:
            for one in (writer, far_writer):
                self._open.discard(one)
                one.transport.abort()
            self._tasks.discard(task)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                await self._speaks.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
