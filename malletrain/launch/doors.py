"""Two TCP ports on this host's loopback that are not open to the host's other users.

Torch's store knows no other sockets than TCP, and everybody on a host may connect to its loopback.
A :class:`FrontDoor` asks the kernel whose process called and hangs up on other users. A
:class:`BackDoor` lets nobody in but connections of its own object: the kernel drops all other
packets before they are a connection (a socket filter, SO_ATTACH_FILTER of socket(7)), so that torch
may accept there itself. Decides nothing else.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import sys

FRONT, BACK = "127.0.0.1", "127.0.0.2"
SO_ATTACH_FILTER = 26
_ATTEMPTS = 50
_ACCEPT, _DROP = 0xFFFFFFFF, 0
_LOAD_WORD, _LOAD_HALF, _IF_EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06
"""Of bpf(4): what is loaded, compared and answered."""
_SOURCE_ADDRESS = 0xFFF0000C
"""SKF_NET_OFF + 12: the source address in the packet's IP header."""
_SOURCE_PORT = 0
_CONNECT_S = 10.0


_MAPPED = "0000000000000000FFFF0000" if sys.byteorder == "little" else "00000000000000000000FFFF"
"""Before an address of IPv4 in /proc/net/tcp6: torch's sockets are of IPv6."""


def _in_table(address: tuple[str, int]) -> str:
    """An address as /proc/net/tcp writes it."""
    number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
    return f"{number:08X}:{address[1]:04X}"


def owner_of(caller: tuple[str, int], called: tuple[str, int]) -> int | None:
    """Whose process is at the ``caller``'s end of a TCP connection within this host.

    Args:
        caller: its address and port.
        called: the address and port that it connected to.

    Returns:
        The user's number; None when there is no such connection any more.
    """
    ends = [_in_table(caller), _in_table(called)]
    mapped = [_MAPPED + end for end in ends]
    for name in ("tcp6", "tcp"):
        try:
            with open(f"/proc/net/{name}", encoding="ascii") as table:
                for line in table:
                    fields = line.split()
                    if fields[1:3] in (ends, mapped):
                        # an end that nobody holds any more counts as user 0, inode 0
                        return int(fields[7]) if int(fields[9]) else None
        except FileNotFoundError:  # no IPv6 here
            continue
    return None


class FrontDoor:
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

    def fileno(self) -> int:
        """Can be read when somebody calls."""
        return self._listener.fileno()

    def accept(self) -> socket.socket | None:
        """The next caller; None when there is none, or it was somebody else's and is gone."""
        try:
            own, caller = self._listener.accept()
        except OSError:
            return None
        try:
            if owner_of(caller, own.getsockname()) == os.geteuid():
                return own
        except OSError:
            pass
        own.close()
        return None

    def close(self) -> None:
        """Nobody is let in any more."""
        self._listener.close()


class BackDoor:
    """A loopback port at which nothing but :meth:`connect` arrives."""

    def __init__(self) -> None:
        """Listen, with every packet dropped.

        Raises:
            OSError: The kernel takes no filter.
        """
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._let_in: dict[socket.socket, int] = {}
        try:
            self._listener.bind((BACK, 0))
            self._filter()
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
        """A connection through the door; hand it to :meth:`hang_up` when it is over.

        Raises:
            OSError: Nobody accepts any more.
        """
        own = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            # While this socket has the port, nobody else on this host can send from it.
            own.bind((FRONT, 0))
            self._let_in[own] = own.getsockname()[1]
            self._filter()
            own.settimeout(_CONNECT_S)
            own.connect((BACK, self.port))
        except OSError:
            self.hang_up(own)
            raise
        return own

    def hang_up(self, own: socket.socket) -> None:
        """Close a connection; its port is let in no more before another may have it."""
        if self._let_in.pop(own, None) is not None and self._listener.fileno() >= 0:
            self._filter()
        own.close()

    def close(self) -> None:
        """The port is left to those that have it."""
        self._listener.close()

    def _filter(self) -> None:
        """Have the kernel drop what comes from another port than those of our connections."""
        mine = int.from_bytes(socket.inet_aton(FRONT), "big")
        program = [
            (_LOAD_WORD, 0, 0, _SOURCE_ADDRESS),
            (_IF_EQUAL, 1, 0, mine),
            (_RETURN, 0, 0, _DROP),
            (_LOAD_HALF, 0, 0, _SOURCE_PORT),
        ]
        for port in self._let_in.values():
            program += [(_IF_EQUAL, 0, 1, port), (_RETURN, 0, 0, _ACCEPT)]
        program.append((_RETURN, 0, 0, _DROP))
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
        given = struct.pack("HP", len(program), ctypes.addressof(code))
        self._listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, given)


def pair_of_doors() -> tuple[FrontDoor, BackDoor]:
    """A front and a back door with the same port number.

    Raises:
        OSError: There are none here.
    """
    for _ in range(_ATTEMPTS):
        back = BackDoor()
        try:
            return FrontDoor(back.port), back
        except OSError as error:
            back.close()
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, "no port is free on the loopback")
