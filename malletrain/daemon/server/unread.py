"""Detects incomplete messages: connections that have sent data without the end of a message.

libzmq keeps an incomplete message of any length, because its limits count whole messages. Decides
which connection is closed for that. The kernel reports how many bytes a connection has received
(tcpi_bytes_received of Linux's TCP_INFO), the socket how many were read. Complete messages of all
connections are read soon, also after the daemon stood still. So a connection counts only if nothing
of it was read for STUCK_S.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

MAX_BYTES = 32 * 1024 * 1024
"""Maximum number of unread bytes of one such connection. The largest valid message is far
smaller.
"""
MAX_TOTAL_BYTES = 4 * MAX_BYTES
"""Maximum number of unread bytes of all of them together. The connection with the most is closed
first.
"""
STUCK_S = 2.0
"""Time without a complete message after which a connection counts, seconds."""
MAX_INTERVAL_S = 0.5
"""Maximum time between two checks that is counted, seconds. In a longer one the daemon stood
still.
"""

FRAME_BYTES = 42
"""Maximum overhead of CURVE and ZMTP per frame, bytes (RFC 26 and 23 of ZeroMQ): 33 and 9."""
GREETING_BYTES = 4096
"""Upper limit of the bytes of a handshake."""
BEATS_BYTES_PER_S = 100.0
"""Upper limit of the rate of libzmq's own heartbeats."""

_TCP_INFO, _BYTES_RECEIVED = 11, 128
"""linux/tcp.h: the option, and the offset of tcpi_bytes_received in it."""


def bytes_received(descriptor: int) -> int:
    """Return the number of bytes received over a connection so far. Raises OSError if it does not
    exist.
    """
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_RECEIVED + 8)
    finally:
        connection.detach()
    (received,) = struct.unpack_from("Q", info, _BYTES_RECEIVED)
    return int(received)


def end_connection(descriptor: int) -> None:
    """Shut a connection down, so that libzmq frees what it has received."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        connection.shutdown(socket.SHUT_RDWR)
    finally:
        connection.detach()


@dataclass
class _Connection:
    """Traffic of one connection."""

    looked: float
    """Time of the last check, seconds."""
    received: int = 0
    """Bytes received until the last check."""
    read: int = 0
    """Bytes read since the last check."""
    unread: float = -GREETING_BYTES
    """Bytes unread at the last check, without the handshake."""
    stuck_s: float = 0.0
    """Time for which nothing was read although bytes wait, seconds."""


class Unread:
    """The unread bytes of all connections. ``received``: a function such as
    :func:`bytes_received`.
    """

    def __init__(self, received: Callable[[int], int] = bytes_received) -> None:
        self._received = received
        self._connections: dict[int, _Connection] = {}
        self._heard: set[int] = set()

    @property
    def heard(self) -> int:
        """Number of open connections over which messages were read."""
        return len(self._heard)

    def began(self, descriptor: int, now: float) -> None:
        """Add an accepted connection."""
        self._connections[descriptor] = _Connection(now)
        self._heard.discard(descriptor)

    def ended(self, descriptor: int) -> None:
        """Remove a connection that has ended."""
        self._connections.pop(descriptor, None)
        self._heard.discard(descriptor)

    def read(self, descriptor: int, size: int, frames: int) -> None:
        """Count a message that was read.

        Args:
            descriptor: descriptor of the connection.
            size: size of the message, bytes.
            frames: number of its frames.
        """
        if (connection := self._connections.get(descriptor)) is not None:
            connection.read += size + frames * FRAME_BYTES
            self._heard.add(descriptor)

    def too_much(self, now: float) -> list[int]:
        """Return the descriptors of the connections to close. Takes about 3 µs for each
        connection.
        """
        stuck = []
        for descriptor, connection in self._connections.items():
            try:
                received = self._received(descriptor)
            except OSError:  # it has ended, which is reported soon
                continue
            elapsed_s = max(0.0, now - connection.looked)
            new_bytes = received - connection.received - BEATS_BYTES_PER_S * elapsed_s
            connection.unread += new_bytes - connection.read
            if connection.received or connection.unread > 0.0:  # else the handshake is not complete
                connection.unread = max(0.0, connection.unread)
            is_read = connection.read > 0 or not connection.unread
            connection.stuck_s = (
                0.0 if is_read else connection.stuck_s + min(elapsed_s, MAX_INTERVAL_S)
            )
            connection.looked, connection.received, connection.read = now, received, 0
            if connection.stuck_s >= STUCK_S:
                stuck.append((connection.unread, descriptor))
        stuck.sort(reverse=True)
        connections, all_bytes = [], sum(size for size, _ in stuck)
        for size, descriptor in stuck:
            if size <= MAX_BYTES and all_bytes <= MAX_TOTAL_BYTES:
                break
            connections.append(descriptor)
            all_bytes -= size
        return connections
