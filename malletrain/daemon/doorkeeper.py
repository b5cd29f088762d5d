"""Who may connect: ZeroMQ asks of each connection whose key it is (ZAP, RFC 27 of ZeroMQ).

Decides nothing but that a key which somebody knows gets in; each message then has that key as its
``User-Id``. After a restart thousands of agents knock at once: it does no more than this.
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
FRAMES = 7
"""Version, request, domain, address, identity, mechanism, and the key."""

_AT_ONCE, _MORE = int(zmq.DONTWAIT), int(zmq.SNDMORE)
"""As plain numbers, as in :mod:`malletrain.daemon.transport`."""


class Doorkeeper:
    """Of one context of ZeroMQ. Make it before the context's sockets are bound.

    Args:
        context: whose connections it is asked of.
        lookup: z85 public key → who that is, ``None`` for a stranger.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], lookup: Callable[[str], str | None]
    ):
        self._lookup = lookup
        self.socket = context.socket(zmq.REP)
        """Becomes readable when somebody knocks."""
        self.socket.linger = 0
        self.socket.bind(ENDPOINT)

    def admit(self, seconds: float) -> bool:
        """Answer who knocks, for so long at most; whether more may wait."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                asked = self._asked()
            except zmq.Again:
                return False
            *first, last = self._answer(asked)
            for frame in first:
                self.socket.send(frame, _MORE)
            self.socket.send(last)
        return True

    def _asked(self) -> list[bytes]:
        """The frames of a question. Raises Again where there is none."""
        frame: Any = self.socket.recv(_AT_ONCE, copy=False)
        frames = [frame.bytes]
        while frame.more:
            frame = self.socket.recv(_AT_ONCE, copy=False)
            frames.append(frame.bytes)
        return frames

    def close(self) -> None:
        """Nobody gets in any more."""
        self.socket.close()

    def _answer(self, asked: list[bytes]) -> list[bytes]:
        request = asked[1] if len(asked) > 1 else b""
        known = (
            len(asked) == FRAMES
            and (asked[0], asked[5]) == (VERSION, MECHANISM)
            and len(asked[6]) == KEY_BYTES
        )
        key = z85.encode(asked[6]) if known else b""
        if known and self._lookup(key.decode("ascii")) is not None:
            return [VERSION, request, b"200", b"OK", key, b""]
        return [VERSION, request, b"400", b"Unknown key", b"", b""]
