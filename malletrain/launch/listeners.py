"""TCP ports on this host's loopback to which other users of the host cannot connect.

torch's store uses TCP only, and every user of a host can connect to its loopback. A
:class:`UserListener` asks the kernel which user's process has connected, and closes the connections
of other users. A :class:`SignedListener` accepts only connections of its own object: every segment
has a signature with a key that only this process knows (RFC 2385, TCP_MD5SIG of tcp(7), which needs
no privilege), and the kernel drops all other segments. So torch itself can accept there.

:class:`Callers` finds the user whose process is at the other end of a connection within this host.
It asks the kernel by sock_diag(7), which looks up one connection and needs no privilege. If a
kernel or a sandbox lacks it, the kernel's table of all connections is read instead, which takes
tens of milliseconds (:func:`owner_in_table`).
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import socket
import struct
import sys

Address = tuple[str, int]

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLMSG_ERROR, _NLM_F_REQUEST = 4, 20, 2, 1
_RAW = socket.SOCK_RAW | socket.SOCK_CLOEXEC
_RESPONSE_TIMEOUT_S = 1.0
_ERROR = struct.Struct("=i")
_HEADER = struct.Struct("=IHHII")
"""A struct nlmsghdr (linux/netlink.h): length, type, flags, sequence, port."""
_REQUEST = struct.Struct("=BBBBI")
"""Start of a struct inet_diag_req_v2 (linux/inet_diag.h): family, protocol, three flags, states. A
struct inet_diag_sockid follows.
"""
_ANSWER = struct.Struct("=BBBB48sIIIII")
"""A struct inet_diag_msg: family, state and two more bytes, a struct inet_diag_sockid, time, two
queues, user, inode.
"""
_ALL_STATES = 0xFFFFFFFF
_NO_COOKIE = b"\xff" * 8

_MAPPED = "0000000000000000FFFF0000" if sys.byteorder == "little" else "00000000000000000000FFFF"
"""Prefix of an IPv4 address in /proc/net/tcp6. torch's sockets are IPv6 sockets."""


class Callers:
    """Looks up the owners of connections in the kernel. Not safe to use from several threads.

    Args:
        listening: address of a listening socket of this process, to test sock_diag with.
    """

    def __init__(self, listening: Address) -> None:
        self._numbers = itertools.count(1)
        self._kernel: socket.socket | None = None
        """The sock_diag socket; None if single connections cannot be looked up. It stays open, so
        that a lookup needs no new file descriptor.
        """
        try:
            self._kernel = socket.socket(socket.AF_NETLINK, _RAW, _NETLINK_SOCK_DIAG)
            self._kernel.settimeout(_RESPONSE_TIMEOUT_S)
            user = self._look_up(self._kernel, listening, ("0.0.0.0", 0))
        except OSError:
            user = None
        if user is None:
            self.close()

    @property
    def has_sock_diag(self) -> bool:
        """Whether single connections can be looked up, by sock_diag."""
        return self._kernel is not None

    def close(self) -> None:
        """Close the sock_diag socket. Later lookups read the table of all connections."""
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    def owner(self, caller: Address, called: Address) -> int | None:
        """Return the user whose process is at the caller's end of a connection.

        Args:
            caller: address and port of the caller's end.
            called: address and port to which it connected.

        Returns:
            The user id; None if the connection no longer exists.

        Raises:
            OSError: the kernel did not respond.
        """
        if self._kernel is None:
            return owner_in_table(caller, called)
        user = self._look_up(self._kernel, caller, called)
        # The kernel reports user 0 and inode 0 for an end that no process has open.
        return user[0] if user and user[1] else None

    def _look_up(
        self, kernel: socket.socket, own: Address, peer: Address
    ) -> tuple[int, int] | None:
        """Return user and inode of the socket with these two ends; None if there is none."""
        (port, host), (peer_port, peer_host) = _end(own), _end(peer)
        ports, number = port + peer_port, next(self._numbers) & 0xFFFFFFFF
        request = _REQUEST.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0, _ALL_STATES)
        request += ports + host + peer_host + bytes(4) + _NO_COOKIE
        length = _HEADER.size + len(request)
        header = _HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, number, 0)
        kernel.sendto(header + request, (0, 0))
        answered = -1
        while answered != number:  # a late response belongs to an earlier request
            answer = kernel.recv(4096)
            _, kind, _, answered, _ = _HEADER.unpack_from(answer)
        if kind == _NLMSG_ERROR:
            code = -_ERROR.unpack_from(answer, _HEADER.size)[0]
            if code == errno.ENOENT:
                return None
            raise OSError(code, os.strerror(code))
        *_, socket_id, _, _, _, user, inode = _ANSWER.unpack_from(answer, _HEADER.size)
        # If there is no such connection, the kernel returns a socket that listens on this port.
        return (user, inode) if socket_id[:4] == ports else None


def _end(address: Address) -> tuple[bytes, bytes]:
    return struct.pack("!H", address[1]), socket.inet_aton(address[0]).ljust(16, b"\0")


def _table_format(address: Address) -> str:
    """Return an address in the format of /proc/net/tcp."""
    number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
    return f"{number:08X}:{address[1]:04X}"


def owner_in_table(caller: Address, called: Address) -> int | None:
    """As :meth:`Callers.owner`, but reads the table of all connections."""
    ends = [_table_format(caller), _table_format(called)]
    mapped = [_MAPPED + end for end in ends]
    for name in ("tcp6", "tcp"):
        try:
            with open(f"/proc/net/{name}", encoding="ascii") as table:
                for line in table:
                    fields = line.split()
                    if fields[1:3] in (ends, mapped):
                        return int(fields[7]) if int(fields[9]) else None
        except FileNotFoundError:  # no IPv6 here
            continue
    return None


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
        """Return a file descriptor that becomes readable when a connection waits."""
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
    """Return a struct tcp_md5sig (linux/tcp.h).

    Args:
        address: peer; the key applies to its segments.
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
        """Return another file descriptor of the listening socket, for code that accepts there and
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
    """Return two listeners on the same port number.

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
