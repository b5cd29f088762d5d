"""The listening end of a cache process: connections in, requests to handlers by name, answers out.

A handler is called with the request's arguments and body. It returns an answer (a dict, or a dict
and a list of buffers) at once, or a coroutine that does. A handler's Refusal, CacheError or
ConnectionLost is told to the caller as a sentence; any other exception too, and is logged.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from infinicache.connection import CacheConnection, CallFailed, ConnectionLost
from infinicache.isal import Buffer
from infinicache.objects import CacheError, TooLarge, Unavailable
from infinicache.store import Refusal

MAX_BODY = 1 << 32
HANDSHAKE_S = 5.0
PAUSE_S = 0.1
"""Time without new connections after one could not be accepted, seconds."""
log = logging.getLogger("infinicache")

_CODES: tuple[tuple[type[Exception], str], ...] = (
    (TooLarge, "too large"),
    (Unavailable, "unavailable"),
    (CacheError, "refused"),
    (ConnectionLost, "unavailable"),
    (CallFailed, "refused"),
)


class Server:
    """Serves ``handlers`` (name → function) on ``host``:``port`` (0: any) in the running loop."""

    def __init__(
        self,
        handlers: dict[str, Callable[..., Any]],
        key: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._key = key
        self.handlers = handlers
        """Name of a request → the function that answers it."""
        self.connections: set[CacheConnection] = set()
        """Open connections."""
        self._tasks: dict[tuple[CacheConnection, int], asyncio.Task[Any]] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, port))
        self._socket.listen(1024)
        self._socket.setblocking(False)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
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
        made = CacheConnection(
            sock,
            self._key,
            serves=True,
            on_message=self._request,
            allocate=_memory,
            on_close=self._closed,
        )
        self.connections.add(made)
        self._loop.call_later(HANDSHAKE_S, self._give_up, made)

    @staticmethod
    def _give_up(connection: CacheConnection) -> None:
        if not connection.ready.done():
            connection.close("no handshake in time")

    def _closed(self, connection: CacheConnection) -> None:
        self.connections.discard(connection)
        for key in [k for k in self._tasks if k[0] is connection]:
            self._tasks.pop(key).cancel()

    def _request(self, connection: CacheConnection, head: dict[str, Any], body: Buffer) -> None:
        number, op = head.pop("id"), head.pop("op")
        if op == "cancel":
            connection.withdraw(number)
            if task := self._tasks.pop((connection, number), None):
                task.cancel()
            return
        try:
            handler = self.handlers.get(op)
            if handler is None:
                raise CacheError(
                    f"{op!r} is no request of this cache; use one version of infinicache "
                    "everywhere."
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
            self._answer(connection, number, _error_reply(error, op))
            return
        self._answer(connection, number, answer)

    def _finished(
        self, connection: CacheConnection, number: int, op: str, task: asyncio.Task[Any]
    ) -> None:
        self._tasks.pop((connection, number), None)
        if not task.cancelled():
            error = task.exception()
            self._answer(connection, number, _error_reply(error, op) if error else task.result())

    @staticmethod
    def _answer(connection: CacheConnection, number: int, answer: Any) -> None:
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


def _error_reply(error: BaseException, op: str) -> dict[str, Any]:
    if isinstance(error, Refusal):
        return {"error": str(error), "code": error.code}
    code = next((code for kind, code in _CODES if isinstance(error, kind)), "")
    if not code:
        log.error("the request %s failed", op, exc_info=error)
        return {
            "error": f"The request {op} failed: {type(error).__name__}: {error}",
            "code": "refused",
        }
    return {"error": str(error), "code": code}
