"""The daemon's socket when connections come and go."""

import asyncio
import socket
import threading

import pytest
import zmq

from malletrain.daemon.transport import Transport
from tests.waiting import PATIENCE_S

MANY = 2050
"""More connections than ZeroMQ keeps ends of for a reader: its thread then waits for ever."""


@pytest.fixture
def made():
    public, secret = zmq.curve_keypair()
    ends = []
    transport = Transport(
        secret, public, lambda key: None, lambda *_: None, lambda _: None, lambda: ends.append(1)
    )
    transport.ends = ends
    return transport


def come_and_go(address, count):
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    for _ in range(count):
        socket.create_connection((host, int(port))).close()


def test_it_closes_after_any_number_of_ends_that_nobody_looked_at(made):
    async def busy():
        come_and_go(made.start("tcp://127.0.0.1:0"), MANY)  # the loop does not run meanwhile

    asyncio.run(busy())
    closing = threading.Thread(target=made.stop, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive(), "the daemon hangs at its end"
