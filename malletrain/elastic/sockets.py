"""Identifies the TCP connections of this process and shuts them down.

Decides only that a connection to the store of the newest round is never shut down.
:mod:`malletrain.elastic.group` decides which connections belong to a group.
"""

from __future__ import annotations

import os
import socket


def open_sockets() -> dict[int, str]:
    """Return the identity (``socket:[inode]``) of each file descriptor of this process that is a
    socket.
    """
    identities = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:"):
            identities[int(name)] = target
    return identities


def listens_on(fd: int) -> int:
    """Return the TCP port on which ``fd`` listens; 0 if it is no listening socket."""
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                return int(copy.getsockname()[1])
    except OSError:
        pass
    return 0


_spared_port = 0


def spare(port: int) -> None:
    """Never shut down a connection to ``port``, at either end. There is one such port at a time.

    A process may connect to the store of the next round while it forms a group; the connection is
    then among those that were opened during that time.
    """
    global _spared_port
    _spared_port = port


def shut_down(fd: int, identity: str, outgoing: bool, ports: set[int]) -> None:
    """Shut down a TCP connection if it is ``outgoing`` or came in on one of ``ports``. A connection
    to the store of the newest round is left alone.

    Args:
        fd: file descriptor of the connection.
        identity: identity that :func:`open_sockets` returned. If ``fd`` has another by now, nothing
            is done.
        outgoing: whether this process may have opened the connection.
        ports: ports on which this process listens for the group.
    """
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if os.readlink(f"/proc/self/fd/{connection.fileno()}") != identity:
                return
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return
            # getpeername() fails for a listening socket, which must not be shut down: gloo would
            # end the process.
            peer_port, own_port = connection.getpeername()[1], connection.getsockname()[1]
            if _spared_port in (peer_port, own_port):
                return
            if outgoing or own_port in ports:
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
