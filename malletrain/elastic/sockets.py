"""The TCP connections of this process, told apart and shut down.

Decides only that one to the newest round's store is never shut down; which connections are a
group's is decided by :mod:`malletrain.elastic.group`.
"""

from __future__ import annotations

import os
import socket


def opened() -> dict[int, str]:
    """Of this process: what each file descriptor that is a socket is."""
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
    """The TCP port that ``fd`` listens on, else 0."""
    try:
        with socket.socket(fileno=os.dup(fd)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                return int(one.getsockname()[1])
    except OSError:
        pass
    return 0


_spared = 0


def spare(port: int) -> None:
    """Never shut a connection to ``port`` down, at either end; only one such port at a time. The
    next round's store may be connected to while a group is formed, and is then among what was
    opened meanwhile.
    """
    global _spared
    _spared = port


def shut_down(fd: int, identity: str, ours: bool, ports: set[int]) -> None:
    """Shut a TCP connection down, if ``fd`` still is the one it was and is ``ours`` or
    came in on one of our ``ports``. One to the store of the newest round never is.
    """
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if os.readlink(f"/proc/self/fd/{connection.fileno()}") != identity:
                return
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return
            # Fails for a listening socket: gloo ends the process over one that is shut down.
            peer, own = connection.getpeername()[1], connection.getsockname()[1]
            if _spared in (peer, own):
                return
            if ours or own in ports:
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
