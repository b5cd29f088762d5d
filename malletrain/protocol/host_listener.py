"""The port to which relays of other hosts connect, with a limit on unauthenticated connections.

Anybody can connect to it. A connection that does not prove the round's key is closed within seconds
and holds a descriptor until then. While there are too many of them, no connection is accepted;
relays with the key retry many times a second.
"""

from __future__ import annotations

import errno
import socket
import time
from collections import deque
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

MAX_UNAUTHENTICATED = 128
"""Maximum number of simultaneous connections that have not proved the key."""
_HANDSHAKE_MS = 10_000
"""Time in which a connection must prove the key, milliseconds."""
REOPEN_S = 0.5
"""Interval at which a closed listener tries to open again, seconds. No event announces that its
port or its address is free again.
"""
_BACKLOG = 100
"""Maximum number of connections that wait to be accepted; ZeroMQ's default."""


_ADDRESS_IS_GONE = (errno.EADDRNOTAVAIL, errno.ENODEV)
"""Errors of a bind to an address that is not, or no longer, this host's."""


def listening(address: str) -> socket.socket:
    """Return a listening socket for a :class:`HostListener` that is created later; connections
    wait until then.

    Args:
        address: to listen at; all addresses if it is a name or not one of this host's.

    Raises:
        OSError: no port can be opened.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ZeroMQ may bind it again
        try:
            socket.inet_pton(listener.family, address)
            listener.bind((address, 0))
        except OSError:
            listener.bind(("", 0))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


class HostListener:
    """Listens for the relays of other hosts.

    Args:
        router: a ROUTER socket under CURVE.
        address: to listen at; all addresses if it is a name or not one of this host's.
        at: a socket of :func:`listening` whose port is used.
    """

    def __init__(self, router: Any, address: str, at: socket.socket | None = None) -> None:
        router.handshake_ivl = _HANDSHAKE_MS
        self.monitor = router.get_monitor_socket()
        """Becomes readable when :meth:`read_monitor` should be called."""
        self._router = router
        self._accepted: dict[int, float] = {}
        """Descriptor of a connection → when it was accepted."""
        self._authenticated: deque[float] = deque()
        """Times at which connections proved the key; ZeroMQ does not report which connections."""
        router.ipv6 = ":" in address
        if at is not None:
            name, port = at.getsockname()[:2]
            router.use_fd = at.detach()
            router.bind(f"tcp://[{name}]:{port}" if ":" in name else f"tcp://{name}:{port}")
            router.use_fd = -1  # a later bind creates a new socket
        else:
            self._bind(router, address)
        self._endpoint = router.get_string(zmq.LAST_ENDPOINT)
        self.open = True
        """Whether connections are accepted."""
        self.port = int(self._endpoint.rpartition(":")[2])
        """The port on which it listens."""

    @staticmethod
    def _bind(router: Any, address: str) -> None:
        host = f"[{address}]" if ":" in address else address
        try:
            socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
            router.bind(f"tcp://{host}:*")
        except (OSError, zmq.ZMQError):
            router.bind("tcp://*:*")

    @property
    def wait_s(self) -> float | None:
        """Maximum time until the next call of :meth:`read_monitor`, seconds; None if the monitor
        tells when it is due."""
        return None if self.open else REOPEN_S

    def read_monitor(self, _: int = 0) -> None:
        """Read the socket's monitor: connections that were accepted, authenticated or closed. Call
        it when the monitor is readable, and after :attr:`wait_s`.
        """
        now = time.monotonic()
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._accepted[event["value"]] = now
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._authenticated.append(now)
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._accepted.pop(event["value"], None)
        unauthenticated = self._unauthenticated(now)
        if self.open and unauthenticated >= MAX_UNAUTHENTICATED:
            self._router.unbind(self._endpoint)
            self.open = False
        elif not self.open and unauthenticated <= MAX_UNAUTHENTICATED // 2:
            self.open = self.reopen()

    def reopen(self) -> bool:
        """Listen again at the same port; at all addresses if this host has lost its address.
        Return False if another process has the port. Accepted connections stay.
        """
        for endpoint in dict.fromkeys((self._endpoint, f"tcp://*:{self.port}")):
            try:
                self._router.bind(endpoint)
            except zmq.ZMQError as error:
                if error.errno not in _ADDRESS_IS_GONE:
                    return False
                continue
            self._endpoint = self._router.get_string(zmq.LAST_ENDPOINT)
            return True
        return False

    def _unauthenticated(self, now: float) -> int:
        """Return an upper bound on the number of connections that have not proved the key.
        Connections older than the handshake time have proved it."""
        since = now - 1.1e-3 * _HANDSHAKE_MS
        while self._authenticated and self._authenticated[0] < since:
            self._authenticated.popleft()
        return sum(at >= since for at in self._accepted.values()) - len(self._authenticated)

    def close(self) -> None:
        """Stop monitoring."""
        self._router.disable_monitor()
