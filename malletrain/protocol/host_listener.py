"""The port at which the relays of other hosts call, and how many strangers may stand before it.

Everybody can connect to it, and who does not have the round's key is hung up on within a few
seconds; until then each holds a descriptor of this process. While too many do, nobody is let in;
those that have the key try again many times a second. Decides nothing of what comes in.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

MOST_STRANGERS = 128
"""Connections at one moment that have not shown the key."""
_SHOW_KEY_MS = 10_000
"""How long a connection has for that."""


_BACKLOG = 100
"""Connections that wait to be taken; ZeroMQ's own number."""


def listening(address: str) -> socket.socket:
    """A port at ``address``, or everywhere, as of a :class:`HostListener` that is made later: until
    then who calls waits. Raises OSError.
    """
    one = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ZeroMQ may bind it once more
        try:
            socket.inet_pton(one.family, address)
            one.bind((address, 0))
        except OSError:
            one.bind(("", 0))
        one.listen(_BACKLOG)
    except BaseException:
        one.close()
        raise
    one.setblocking(False)
    return one


class HostListener:
    """Listens with ``router``, a socket under CURVE, at ``address``; where that is a name, or not
    one of this host's, everywhere. With ``at`` the port is that of :func:`listening`.
    """

    def __init__(self, router: Any, address: str, at: socket.socket | None = None) -> None:
        router.handshake_ivl = _SHOW_KEY_MS
        self.monitor = router.get_monitor_socket()
        """Can be read when :meth:`noticed` should be called."""
        self._router = router
        self._came: dict[int, float] = {}
        """Connection, by its descriptor → when it was made."""
        self._shown: deque[float] = deque()
        """When a connection showed the key; which one did is not told."""
        router.ipv6 = ":" in address
        if at is not None:
            name, port = at.getsockname()[:2]
            router.use_fd = at.detach()
            router.bind(f"tcp://[{name}]:{port}" if ":" in name else f"tcp://{name}:{port}")
            router.use_fd = -1  # the next time it makes one itself
        else:
            self._bind(router, address)
        self._endpoint = router.get_string(zmq.LAST_ENDPOINT)
        self.open = True
        """Whether somebody can connect."""
        self.port = int(self._endpoint.rpartition(":")[2])
        """Where it listens."""

    @staticmethod
    def _bind(router: Any, address: str) -> None:
        host = f"[{address}]" if ":" in address else address
        try:
            socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
            router.bind(f"tcp://{host}:*")
        except (OSError, zmq.ZMQError):
            router.bind("tcp://*:*")

    def noticed(self, _: int = 0) -> None:
        """Somebody came, showed the key, or went."""
        now = time.monotonic()
        while self.monitor.poll(0):
            told = parse_monitor_message(self.monitor.recv_multipart())
            if told["event"] == zmq.EVENT_ACCEPTED:
                self._came[told["value"]] = now
            elif told["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._shown.append(now)
            elif told["event"] == zmq.EVENT_DISCONNECTED:
                self._came.pop(told["value"], None)
        strangers = self._strangers(now)
        if self.open and strangers >= MOST_STRANGERS:
            self._router.unbind(self._endpoint)
            self.open = False
        elif not self.open and strangers <= MOST_STRANGERS // 2:
            try:
                self._router.bind(self._endpoint)
                self.open = True
            except zmq.ZMQError:
                pass  # somebody has the port; those that are in stay

    def _strangers(self, now: float) -> int:
        """How many have not shown the key, at most: who is there for longer has."""
        since = now - 1.1e-3 * _SHOW_KEY_MS
        while self._shown and self._shown[0] < since:
            self._shown.popleft()
        return sum(at >= since for at in self._came.values()) - len(self._shown)

    def close(self) -> None:
        """Notice nothing any more."""
        self._router.disable_monitor()
