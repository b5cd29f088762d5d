"""The listening end of a process that serves requests: connections in, requests to handlers by
name, answers out.

A handler is called with the request's arguments and body. It returns an answer (a dict, or a dict
and a list of buffers) at once, or a coroutine that does. An exception of a handler is told to the
caller as a sentence; one of an unknown kind is logged, too.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from malletrain.streams.connection import Buffer, CallFailed, ConnectionLost, StreamConnection

MAX_BODY = 1 << 32
HANDSHAKE_S = 5.0
PAUSE_S = 0.1
"""Time without new connections after one could not be accepted, seconds."""
log = logging.getLogger("malletrain.streams")

_CODES: tuple[tuple[type[Exception], str], ...] = (
    (ConnectionLost, "unavailable"),
    (CallFailed, "refused"),
)


class StreamServer:
    """Serves ``handlers`` (name → function) in the running loop.

    Args:
        handlers: the functions that answer, by name of the request.
        key: key that a client must have.
        protocol: name of the protocol, part of what both ends prove.
        host: address on which it listens, IPv4 or IPv6.
        port: port; 0 for any.
        listener: a socket that listens already, instead of ``host`` and ``port``.
    """

    def __init__(
        self,
        handlers: dict[str, Callable[..., Any]],
        key: bytes,
        protocol: str,
        host: str = "127.0.0.1",
        port: int = 0,
        listener: socket.socket | None = None,
    ) -> None:
        self._key, self._protocol = key, protocol
        self.handlers = handlers
        """Name of a request → the function that answers it."""
        self.connections: set[StreamConnection] = set()
        """Open connections."""
        self._tasks: dict[tuple[StreamConnection, int], asyncio.Task[Any]] = {}
        host = host.strip("[]")
        if listener is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(1024)
        self._socket = listener
        self._socket.setblocking(False)
        port = self._socket.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.delay_s: Callable[[str], float] = lambda op: 0.0
        """Seconds to wait before an answer: for measuring what a straggler does."""
        self._loop = asyncio.get_running_loop()
        self._listen()

    def _listen(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # no free descriptors: the caller waits, and the socket stays readable
            self._loop.remove_reader(self._socket.fileno())
            self._loop.call_later(PAUSE_S, self._listen)
            return
        connection = StreamConnection(
            sock,
            self._key,
            self._protocol,
            serves=True,
            on_message=self._request,
            allocate=_memory,
            on_close=self._closed,
        )
        self.connections.add(connection)
        self._loop.call_later(HANDSHAKE_S, self._give_up, connection)

    @staticmethod
    def _give_up(connection: StreamConnection) -> None:
        if not connection.ready.done():
            connection.close("no handshake in time")

    def _closed(self, connection: StreamConnection) -> None:
        self.connections.discard(connection)
        for key in [k for k in self._tasks if k[0] is connection]:
            self._tasks.pop(key).cancel()

    def _request(self, connection: StreamConnection, head: dict[str, Any], body: Buffer) -> None:
        number, op = head.pop("id"), head.pop("op")
        if op == "cancel":
            connection.withdraw(number)
            if task := self._tasks.pop((connection, number), None):
                task.cancel()
            return
        try:
            handler = self.handlers.get(op)
            if handler is None:
                raise CallFailed(
                    f"{op!r} is no request of {self._protocol}; use one version everywhere.",
                    "refused",
                )
            if body:
                head["body"] = body
            answer = handler(**head)
            if inspect.iscoroutine(answer) or (delay := self.delay_s(op)) > 0:
                task = self._loop.create_task(
                    answer if inspect.iscoroutine(answer) else _later(delay, answer)
                )
                self._tasks[connection, number] = task
                task.add_done_callback(partial(self._finished, connection, number, op))
                return
        except Exception as error:
            self._answer(connection, number, self._error_reply(error, op))
            return
        self._answer(connection, number, answer)

    def _finished(
        self, connection: StreamConnection, number: int, op: str, task: asyncio.Task[Any]
    ) -> None:
        self._tasks.pop((connection, number), None)
        if not task.cancelled():
            error = task.exception()
            self._answer(
                connection, number, self._error_reply(error, op) if error else task.result()
            )

    def error_code(self, error: BaseException) -> str:
        """Return the code that names ``error`` to the caller; empty if it is unexpected."""
        return next((code for kind, code in _CODES if isinstance(error, kind)), "")

    def _error_reply(self, error: BaseException, op: str) -> dict[str, Any]:
        code = self.error_code(error)
        if not code:
            log.error("the request %s failed", op, exc_info=error)
            return {
                "error": f"The request {op} failed: {type(error).__name__}: {error}",
                "code": "refused",
            }
        return {"error": str(error), "code": code}

    @staticmethod
    def _answer(connection: StreamConnection, number: int, answer: Any) -> None:
        head, body = answer if isinstance(answer, tuple) else (answer or {}, [])
        connection.send({"id": number, **head}, body, number)

    def close(self) -> None:
        """Stop listening and close every connection."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for connection in list(self.connections):
            connection.close()


async def _later(delay: float, answer: Any) -> Any:
    await asyncio.sleep(delay)
    return answer


def _memory(head: dict[str, Any], length: int) -> Buffer:
    if length > MAX_BODY:
        raise ValueError(f"a body of {length} bytes")
    return bytearray(length)
