"""The daemon's socket when connections come and go."""

import asyncio
import socket
import threading

import pytest

from malletrain.daemon.transport import Transport
from malletrain.identity.keys import new_pair
from malletrain.protocol import messages
from tests.waiting import PATIENCE_S

MANY = 2050
"""More connections than ZeroMQ keeps ends of for a reader: its thread then waits for ever."""


class Deaf:
    """A receiver that counts what it is told."""

    def __init__(self):
        self.ends = 0

    def message(self, peer, who, message):
        raise AssertionError("nobody says anything here")

    def invalid(self, sentence):
        raise AssertionError(sentence)

    def disconnected(self):
        self.ends += 1


@pytest.fixture
def made():
    return Transport(new_pair(), lambda key: None)


def come_and_go(address, count):
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    for _ in range(count):
        socket.create_connection((host, int(port))).close()


def test_it_closes_after_any_number_of_ends_that_nobody_looked_at(made):
    async def busy():
        address = made.bind("tcp://127.0.0.1:0")
        made.serve(receiver)
        come_and_go(address, MANY)  # the loop does not run meanwhile

    receiver = Deaf()
    asyncio.run(busy())
    closing = threading.Thread(target=made.stop, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive(), "the daemon hangs at its end"
    assert receiver.ends > 0


def test_what_is_sent_after_its_end_is_heard_by_nobody(made):
    made.bind("tcp://127.0.0.1:0")
    made.stop()
    assert not made.send(b"peer", messages.Alive("boot"))


def test_however_much_is_sent_in_one_turn_it_looks_for_messages_once(made):
    async def busy():
        made.bind("tcp://127.0.0.1:0")
        made.serve(Deaf())
        await asyncio.sleep(0)
        loop, due = asyncio.get_running_loop(), []
        soon = loop.call_soon
        loop.call_soon = lambda what, *rest, **options: (
            due.append(what) or soon(what, *rest, **options)
        )
        for _ in range(50):
            made.send(b"nobody", messages.Goodbye("Nobody is there."))
        del loop.call_soon
        made.stop()
        return len(due)

    assert asyncio.run(busy()) == 1
