"""TCP ports for tests whose subject cannot choose one itself: never those of outgoing connections,
which another process may get at any moment.
"""

from __future__ import annotations

import random
import socket

BLOCK = 128
"""Ports that a test has for itself; below those of outgoing connections."""


def free_ports(count: int) -> tuple[int, socket.socket]:
    """The first of ``count`` free ports in a row, and a name in the kernel that keeps other tests
    off them until it is closed.
    """
    assert count <= BLOCK
    for base in random.sample(range(10000, 32700 - BLOCK, BLOCK), 100):
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0malletrain-test-ports-{base}")
        except OSError:
            name.close()
            continue
        sockets = []
        try:
            for port in range(base, base + count):
                probe = socket.socket()
                sockets.append(probe)
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
            return base, name
        except OSError:
            name.close()
        finally:
            for probe in sockets:
                probe.close()
    raise AssertionError("there are no free ports")
