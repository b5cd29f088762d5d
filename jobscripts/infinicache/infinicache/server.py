"""The listening end of a cache process: :mod:`malletrain.streams` with the cache's errors.

A handler's Refusal, CacheError or ConnectionLost is told to the caller as a sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infinicache.connection import PROTOCOL
from infinicache.objects import CacheError, TooLarge, Unavailable
from infinicache.store import Refusal
from malletrain.streams.server import StreamServer

_CODES: tuple[tuple[type[Exception], str], ...] = (
    (TooLarge, "too large"),
    (Unavailable, "unavailable"),
    (CacheError, "refused"),
)


class Server(StreamServer):
    """Serves ``handlers`` (name → function) on ``host``:``port`` (0: any) in the running loop."""

    def __init__(
        self,
        handlers: dict[str, Callable[..., Any]],
        key: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        super().__init__(handlers, key, PROTOCOL, host, port)

    def error_code(self, error: BaseException) -> str:
        """Return the code that names ``error`` to the caller; empty if it is unexpected."""
        if isinstance(error, Refusal):
            return error.code
        code = next((code for kind, code in _CODES if isinstance(error, kind)), "")
        return code or super().error_code(error)
