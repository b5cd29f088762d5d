"""Two TCP ports on this host's loopback that are not open to the host's other users.

Torch's store knows no other sockets than TCP, and everybody on a host may connect to its loopback.
A :class:`PublicListener` asks the kernel whose process called and hangs up on other users. A
:class:`PrivateListener` lets nobody in but connections of its own object: every segment carries a
signature by a key that only this process knows (RFC 2385, TCP_MD5SIG of tcp(7), which takes no
privilege), and the kernel drops all others before they are a connection. So torch may accept there
itself. Decides nothing else.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct

from malletrain.launch.callers import Callers

FRONT, BACK = "127.0.0.1", "127.0.0.2"
_ATTEMPTS = 50
TCP_MD5SIG, TCP_MD5SIG_EXT = 14, 32
_ANY_ADDRESS = 1
"""TCP_MD5SIG_FLAG_PREFIX: the key is for all addresses that begin alike; here, for all."""
_KEY_BYTES = 64
_CONNECT_S = 10.0
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""What is wrong when a caller cannot be let in for want of something; who calls stays there."""


class PublicListener:
    """A loopback port for processes of this user."""

    def __init__(self, port: int = 0) -> None:
        """Listen.

        Args:
            port: 0: one that is free.

        Raises:
            OSError: The port is taken.
        """
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._listener.bind((FRONT, port))
            self._listener.listen(1024)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        """Where it listens."""
        self._callers = Callers((FRONT, self.port))

    def fileno(self) -> int:
        """Can be read when somebody calls."""
        return self._listener.fileno()

    def accept(self) -> socket.socket | None:
        """The next caller; None when there is none, or it was somebody else's and is gone.

        Raises:
            OSError: The next caller cannot be let in now, such as for want of descriptors, and
                waits.
        """
        try:
            own, caller = self._listener.accept()
        except OSError as error:
            if error.errno in _SHORT:
                raise
            return None
        try:
            if self._callers.owner(caller, own.getsockname()) == os.geteuid():
                return own
        except OSError:
            pass
        own.close()
        return None

    def close(self) -> None:
        """Nobody is let in any more."""
        self._callers.close()
        self._listener.close()


def _signature(address: str, flags: int, key: bytes) -> bytes:
    """A struct tcp_md5sig (linux/tcp.h): sign what goes to ``address`` and comes from there."""
    peer = struct.pack("=HH4s", socket.AF_INET, 0, socket.inet_aton(address)).ljust(128, b"\0")
    return peer + struct.pack("=BBHi", flags, 0, len(key), 0) + key.ljust(80, b"\0")


class PrivateListener:
    """A loopback port at which nothing but :meth:`connect` arrives."""

    def __init__(self) -> None:
        """Listen for signed segments alone.

        Raises:
            OSError: The port cannot be had.
        """
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.closed = True
        """Whether the kernel keeps others out. One without MD5 (FIPS) does not."""
        try:
            self._listener.bind((BACK, 0))
            try:
                given = _signature("0.0.0.0", _ANY_ADDRESS, self._key)
                self._listener.setsockopt(socket.IPPROTO_TCP, TCP_MD5SIG_EXT, given)
            except OSError:
                self.closed = False
            self._listener.listen(1024)
        except OSError:
            self._listener.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        """Where it listens."""

    def taken(self) -> int:
        """A descriptor of the port for whoever accepts there, and closes it."""
        return os.dup(self._listener.fileno())

    def connect(self) -> socket.socket:
        """A connection through the door.

        Raises:
            OSError: Nobody accepts any more.
        """
        own = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            if self.closed:
                given = _signature(BACK, 0, self._key)
                own.setsockopt(socket.IPPROTO_TCP, TCP_MD5SIG, given)
            own.settimeout(_CONNECT_S)
            own.connect((BACK, self.port))
        except OSError:
            own.close()
            raise
        return own

    def close(self) -> None:
        """The port is left to those that have it."""
        self._listener.close()


def listener_pair() -> tuple[PublicListener, PrivateListener]:
    """A front and a back door with the same port number.

    Raises:
        OSError: There are none here.
    """
    for _ in range(_ATTEMPTS):
        back = PrivateListener()
        try:
            return PublicListener(back.port), back
        except OSError as error:
            back.close()
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, "no port is free on the loopback")
