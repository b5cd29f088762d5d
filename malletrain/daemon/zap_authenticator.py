"""Authenticates connections: ZeroMQ sends it the key of each (ZAP, ZeroMQ RFC 27).

Decides only that a known key is admitted; each message then carries that key as its ``User-Id``.
After a restart thousands of agents connect at once, so it does no more than this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85

ENDPOINT = "inproc://zeromq.zap.01"
VERSION, MECHANISM = b"1.0", b"CURVE"
KEY_BYTES = 32
ZAP_FRAMES = 7
"""Number of frames of a request: version, request id, domain, address, identity, mechanism, key."""

_AT_ONCE = int(zmq.DONTWAIT)
_MORE = int(zmq.SNDMORE)
"""Flags as plain integers, as in :mod:`malletrain.daemon.transport`."""


class ZapAuthenticator:
    """Answers the authentication requests of one ZeroMQ context. Create it before the sockets of
    the context are bound.

    Args:
        context: the context whose connections are authenticated.
        lookup: returns the owner of a public key (z85); None for an unknown key.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], lookup: Callable[[str], str | None]
    ):
        self._lookup = lookup
        self.socket = context.socket(zmq.REP)
        """Becomes readable when a connection waits to be authenticated."""
        self.socket.linger = 0
        self.socket.bind(ENDPOINT)

    def admit(self, seconds: float) -> bool:
        """Authenticate waiting connections for ``seconds`` at most. Returns whether more may
        wait.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                request = self._receive()
            except zmq.Again:
                return False
            *first, last = self._answer(request)
            for frame in first:
                self.socket.send(frame, _MORE)
            self.socket.send(last)
        return True

    def _receive(self) -> list[bytes]:
        """Read the frames of a request. Raises Again if there is none."""
        frame: Any = self.socket.recv(_AT_ONCE, copy=False)
        frames = [frame.bytes]
        while frame.more:
            frame = self.socket.recv(_AT_ONCE, copy=False)
            frames.append(frame.bytes)
        return frames

    def close(self) -> None:
        """Stop authenticating connections."""
        self.socket.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        request_id = request[1] if len(request) > 1 else b""
        valid = (
            len(request) == ZAP_FRAMES
            and (request[0], request[5]) == (VERSION, MECHANISM)
            and len(request[6]) == KEY_BYTES
        )
        key = z85.encode(request[6]) if valid else b""
        if valid and self._lookup(key.decode("ascii")) is not None:
            return [VERSION, request_id, b"200", b"OK", key, b""]
        return [VERSION, request_id, b"400", b"Unknown key", b"", b""]
