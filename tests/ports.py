"""TCP ports for tests whose subject cannot choose one itself. They are outside the range of
outgoing connections, from which another process may get a port at any moment.
"""

from __future__ import annotations

import random
import socket

BLOCK = 128
"""Range of ports for tests, below that of outgoing connections."""


def free_ports(count: int) -> tuple[int, socket.socket]:
    """Reserve ``count`` free ports in a row. Return the first, and a socket with a name in the
    kernel that keeps other tests off them until it is closed.
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
