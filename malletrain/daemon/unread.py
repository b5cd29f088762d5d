"""Incomplete messages: what connections have sent while the end of a message does not come.

libzmq keeps an incomplete message however long it becomes, and its limits count whole messages.
Decides which connection is closed for that. The kernel says how many bytes a connection received
(tcpi_bytes_received of Linux's TCP_INFO), the socket how many were read. Complete messages are read
soon, of all connections in turn, also after the daemon stood still; so a connection counts only if
nothing of it was read for STUCK_S.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

MOST_BYTES = 32 * 1024 * 1024
"""Of one such connection; the largest message that may be is far smaller."""
MOST_OF_ALL_BYTES = 4 * MOST_BYTES
"""Of all of them together: who has most goes first."""
STUCK_S = 2.0
LONGEST_LOOK_S = 0.5
"""A look that comes later after the one before counts as much: the daemon stood still."""

FRAME_BYTES = 42
"""What CURVE and ZMTP add to a frame at most (RFC 26 and 23 of ZeroMQ): 33 and 9."""
GREETING_BYTES = 4096
"""More than a connection begins with."""
BEATS_BYTES_PER_S = 100.0
"""More than libzmq's own heartbeats take."""

_TCP_INFO, _BYTES_RECEIVED = 11, 128
"""linux/tcp.h: the option, and the place of tcpi_bytes_received in it."""


def bytes_received(descriptor: int) -> int:
    """What came in over this connection so far. Raises OSError where there is none."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_RECEIVED + 8)
    finally:
        connection.detach()
    (received,) = struct.unpack_from("Q", info, _BYTES_RECEIVED)
    return int(received)


def end_connection(descriptor: int) -> None:
    """Nothing comes in over it any more, and libzmq lets go of what did."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        connection.shutdown(socket.SHUT_RDWR)
    finally:
        connection.detach()


@dataclass
class _Connection:
    """What is known of one."""

    looked: float
    received: int = 0
    """At the last look."""
    read: int = 0
    """Since then."""
    unread: float = -GREETING_BYTES
    """At the last look; what a connection begins with is no message."""
    stuck_s: float = 0.0
    """For so long nothing was read of it, and something waits."""


class Unread:
    """Of all connections. ``received``: as :func:`bytes_received`."""

    def __init__(self, received: Callable[[int], int] = bytes_received) -> None:
        self._received = received
        self._of: dict[int, _Connection] = {}
        self._heard: set[int] = set()

    @property
    def heard(self) -> int:
        """Over how many of the connections that there are something was read."""
        return len(self._heard)

    def began(self, descriptor: int, now: float) -> None:
        """A connection was taken."""
        self._of[descriptor] = _Connection(now)
        self._heard.discard(descriptor)

    def ended(self, descriptor: int) -> None:
        """One is over."""
        self._of.pop(descriptor, None)
        self._heard.discard(descriptor)

    def read(self, descriptor: int, size: int, frames: int) -> None:
        """Of one a message of so many bytes in so many frames was read."""
        if (of := self._of.get(descriptor)) is not None:
            of.read += size + frames * FRAME_BYTES
            self._heard.add(descriptor)

    def too_much(self, now: float) -> list[int]:
        """Whose connections are to be ended. Asks the system for each: some 3 µs."""
        stuck = []
        for descriptor, of in self._of.items():
            try:
                received = self._received(descriptor)
            except OSError:  # it is over, and that is told in a moment
                continue
            since = max(0.0, now - of.looked)
            came = received - of.received - BEATS_BYTES_PER_S * since
            of.unread += came - of.read
            if of.received or of.unread > 0.0:  # else the greeting is on its way
                of.unread = max(0.0, of.unread)
            moves = of.read > 0 or not of.unread
            of.stuck_s = 0.0 if moves else of.stuck_s + min(since, LONGEST_LOOK_S)
            of.looked, of.received, of.read = now, received, 0
            if of.stuck_s >= STUCK_S:
                stuck.append((of.unread, descriptor))
        stuck.sort(reverse=True)
        connections, all_bytes = [], sum(size for size, _ in stuck)
        for size, descriptor in stuck:
            if size <= MOST_BYTES and all_bytes <= MOST_OF_ALL_BYTES:
                break
            connections.append(descriptor)
            all_bytes -= size
        return connections
