"""TCP ports on this host's loopback to which other users of the host cannot connect.

torch's store uses TCP only, and every user of a host can connect to its loopback. A
:class:`UserListener` asks the kernel which user's process has connected, and closes the connections
of other users. A :class:`SignedListener` accepts only connections of its own object: every segment
has a signature with a key that only this process knows (RFC 2385, TCP_MD5SIG of tcp(7), which needs
no privilege), and the kernel drops all other segments. So torch itself can accept there.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct

from malletrain.launch.callers import Callers

USER_ADDRESS, SIGNED_ADDRESS = "127.0.0.1", "127.0.0.2"
_ATTEMPTS = 50
TCP_MD5SIG, TCP_MD5SIG_EXT = 14, 32
_ANY_ADDRESS = 1
"""TCP_MD5SIG_FLAG_PREFIX: the key applies to all addresses with a prefix; here, to all."""
_KEY_BYTES = 64
_CONNECT_S = 10.0
_RESOURCE_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of accept(2) for lack of resources. The connection stays in the queue."""


class UserListener:
    """A loopback port for the processes of this user."""

    def __init__(self, port: int = 0) -> None:
        """Listen.

        Args:
            port: port on which to listen; 0 for a free one.

        Raises:
            OSError: the port is in use.
        """
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._listener.bind((USER_ADDRESS, port))
            self._listener.listen(1024)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        """The port on which it listens."""
        self._callers = Callers((USER_ADDRESS, self.port))

    def fileno(self) -> int:
        """Returns a file descriptor that becomes readable when a connection waits."""
        return self._listener.fileno()

    def accept(self) -> socket.socket | None:
        """Accept the next connection.

        Returns:
            The connection; None if there is none, or if it was that of another user and was closed.

        Raises:
            OSError: there are no resources, such as file descriptors. The connection stays in the
                queue.
        """
        try:
            own, caller = self._listener.accept()
        except OSError as error:
            if error.errno in _RESOURCE_ERRORS:
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
        """Accept no more connections."""
        self._callers.close()
        self._listener.close()


def _signature(address: str, flags: int, key: bytes) -> bytes:
    """Returns a struct tcp_md5sig (linux/tcp.h).

    Args:
        address: peer to whose segments the key applies.
        flags: flags of TCP_MD5SIG_EXT.
        key: the key.
    """
    peer = struct.pack("=HH4s", socket.AF_INET, 0, socket.inet_aton(address)).ljust(128, b"\0")
    return peer + struct.pack("=BBHi", flags, 0, len(key), 0) + key.ljust(80, b"\0")


class SignedListener:
    """A loopback port that accepts only connections of :meth:`connect`."""

    def __init__(self) -> None:
        """Listen for signed segments only.

        Raises:
            OSError: no port can be opened.
        """
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.enforced = True
        """Whether the kernel drops unsigned segments. A kernel without MD5 (FIPS) does not."""
        try:
            self._listener.bind((SIGNED_ADDRESS, 0))
            try:
                option = _signature("0.0.0.0", _ANY_ADDRESS, self._key)
                self._listener.setsockopt(socket.IPPROTO_TCP, TCP_MD5SIG_EXT, option)
            except OSError:
                self.enforced = False
            self._listener.listen(1024)
        except OSError:
            self._listener.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        """The port on which it listens."""

    def duplicate(self) -> int:
        """Returns another file descriptor of the listening socket, for code that accepts there and
        closes it.
        """
        return os.dup(self._listener.fileno())

    def connect(self) -> socket.socket:
        """Connect to the port.

        Raises:
            OSError: the port no longer accepts connections.
        """
        own = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            if self.enforced:
                option = _signature(SIGNED_ADDRESS, 0, self._key)
                own.setsockopt(socket.IPPROTO_TCP, TCP_MD5SIG, option)
            own.settimeout(_CONNECT_S)
            own.connect((SIGNED_ADDRESS, self.port))
        except OSError:
            own.close()
            raise
        return own

    def close(self) -> None:
        """Close this object's descriptor; duplicates stay open."""
        self._listener.close()


def listener_pair() -> tuple[UserListener, SignedListener]:
    """Returns two listeners on the same port number.

    Raises:
        OSError: no port can be opened.
    """
    for _ in range(_ATTEMPTS):
        signed = SignedListener()
        try:
            return UserListener(signed.port), signed
        except OSError as error:
            signed.close()
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, "no port is free on the loopback")
