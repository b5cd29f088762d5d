"""Connections over which messages come that do not end."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from malletrain.daemon.server import transport as transport_module
from malletrain.daemon.server.sender_limits import (
    FRAME_BYTES,
    GREETING_BYTES,
    MAX_TOTAL_UNREAD_BYTES,
    MAX_UNREAD_BYTES,
    STUCK_S,
    Unread,
    bytes_received,
)
from malletrain.daemon.server.transport import CONNECTION_BYTES, Transport
from malletrain.identity.keys import new_pair
from malletrain.protocol import messages
from malletrain.protocol.wire import encode
from tests.malletrain.daemon.raw_curve import RawClient
from tests.waiting import PATIENCE_S

MB = 1_000_000


def looks(of, begin, seconds, step=0.5):
    """The connections to end, of all looks within so many seconds."""
    connections, at = [], begin
    while at <= begin + seconds:
        connections += of.too_much(at)
        at += step
    return connections


def test_a_connection_of_which_much_came_and_nothing_was_read_for_a_while_is_ended():
    came = {7: GREETING_BYTES + MAX_UNREAD_BYTES + 1000}
    of = Unread(came.__getitem__)
    of.began(7, 100.0)
    assert looks(of, 100.5, STUCK_S - 1.0) == []
    assert looks(of, 100.5 + STUCK_S, 1.0) == [7, 7, 7]
    of.ended(7)
    assert looks(of, 110.0, 10.0) == []


def test_who_has_less_waiting_stays():
    of = Unread(lambda descriptor: GREETING_BYTES + MAX_UNREAD_BYTES)
    of.began(7, 100.0)
    assert looks(of, 100.5, 60.0) == []


def test_what_waits_after_a_standstill_ends_nobody():
    """A little is read of each connection between two looks, although ever more comes."""
    came = dict.fromkeys(range(100), 10 * MAX_UNREAD_BYTES)
    of = Unread(came.__getitem__)
    for descriptor in came:
        of.began(descriptor, 0.0)
    connections, at = of.too_much(60.0), 60.0
    for _ in range(200):
        at += 0.5
        for descriptor in came:
            of.read(descriptor, 1, 1)
            came[descriptor] += MAX_UNREAD_BYTES
        connections += of.too_much(at)
    assert connections == []
    assert looks(of, at, STUCK_S + 1.0, 0.5), "then nothing is read of them any more"


def test_a_daemon_that_stands_still_again_and_again_ends_nobody_sooner():
    of = Unread(lambda descriptor: 10 * MAX_UNREAD_BYTES)
    of.began(7, 0.0)
    assert looks(of, 60.0, 2 * 60.0, 60.0) == []


def test_a_long_or_a_busy_life_earns_no_more():
    came = {7: 1000}
    of = Unread(came.__getitem__)
    of.began(7, 0.0)
    for minute in range(1, 30 * 24 * 60):
        came[7] += 600  # less than the heartbeats that are taken off
        of.read(7, 10, 20)
        assert of.too_much(60.0 * minute) == []
    came[7] += MAX_UNREAD_BYTES + 200_000
    assert looks(of, 60.0 * 30 * 24 * 60, STUCK_S + 1.0), "a month later as on the first day"


def test_of_all_together_who_has_most_goes_until_there_is_room():
    size = MAX_TOTAL_UNREAD_BYTES // 10
    waiting = {
        descriptor: size + 1000 * (descriptor + 1) + GREETING_BYTES for descriptor in range(12)
    }
    of = Unread(waiting.__getitem__)
    for descriptor in waiting:
        of.began(descriptor, 0.0)
    assert looks(of, 0.5, STUCK_S - 1.0) == []
    assert of.too_much(STUCK_S) == [11, 10, 9]
    for descriptor in (11, 10, 9):
        of.read(descriptor, size, 0)
    assert looks(of, STUCK_S + 0.5, 5.0) == []


def test_a_descriptor_of_something_else_is_left_alone(tmp_path):
    of = Unread()
    with (tmp_path / "file").open("w") as file:
        of.began(file.fileno(), 0.0)
        assert of.too_much(0.0) == []
    of.began(10**6, 0.0)
    assert of.too_much(0.0) == []


class Receiver:
    """Keeps what it is told."""

    def __init__(self):
        self.heard, self.sentences = [], []

    @contextlib.contextmanager
    def batch(self):
        yield

    def message(self, peer, who, message, size, key):
        self.heard.append(message)

    def invalid(self, sentence):
        self.sentences.append(sentence)

    def disconnected(self, peer):
        self.heard.append("gone")


@contextlib.contextmanager
def listening():
    keys, receiver = new_pair(), Receiver()
    transport = Transport(keys, lambda key: "unauthenticated:one")
    try:
        yield transport, transport.bind("tcp://127.0.0.1:0"), keys, receiver
    finally:
        transport.stop()


def test_a_message_that_does_not_end_ends_its_connection_and_others_go_on():
    async def busy():
        with listening() as (transport, address, keys, receiver):
            transport.serve(receiver)
            fair = await asyncio.to_thread(RawClient, address, keys.public, new_pair())
            bad = await asyncio.to_thread(RawClient, address, keys.public, new_pair())

            def endless():
                with contextlib.suppress(OSError):
                    for _ in range(MAX_UNREAD_BYTES // MB + 10):
                        bad.send(bytes(MB), more=True)
                    bad.wait_for_the_end()

            cut = asyncio.ensure_future(asyncio.to_thread(endless))
            while not cut.done():
                transport.end_unreadable(True)
                await asyncio.sleep(0.01)
            await cut
            [sentence] = receiver.sentences
            assert "An incomplete message filled memory" in sentence
            *frames, last = encode(messages.Heartbeat("boot"))
            for frame in frames:
                fair.send(frame, more=True)
            fair.send(last)
            while not receiver.heard:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert receiver.heard == [messages.Heartbeat("boot")]
            fair.close()
            bad.close()

    asyncio.run(asyncio.wait_for(busy(), PATIENCE_S))


def test_what_connections_take_is_known_as_long_as_they_are_there_and_somebody_spoke():
    async def counted():
        with (
            listening() as (transport, address, keys, receiver),
            contextlib.ExitStack() as strangers,
        ):
            transport.serve(receiver)
            assert transport.connection_bytes == 0
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            for _ in range(3):  # they come before those who speak, and are taken in this order
                strangers.enter_context(socket.create_connection((host, int(port))))
            there = [
                await asyncio.to_thread(RawClient, address, keys.public, new_pair())
                for _ in range(2)
            ]
            for client, heard in zip(there, (1, 2), strict=True):
                client.send(b"x")
                while len(receiver.sentences) < heard:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert transport.connection_bytes == heard * CONNECTION_BYTES
            for remaining in (1, 0):
                there[remaining].socket.shutdown(socket.SHUT_RDWR)
                while transport.connection_bytes != remaining * CONNECTION_BYTES:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            for client in there:
                client.close()

    asyncio.run(asyncio.wait_for(counted(), PATIENCE_S))


@pytest.mark.parametrize("size", [1, 300, 100_000])
def test_what_was_read_is_counted_as_the_system_counts_it(monkeypatch, size):
    """The count is at least what came, and exceeds it by the framing of each message at most."""
    number, counted, descriptors = 2000 if size < 1000 else 50, [], set()

    class Watched(Unread):
        def read(self, descriptor, size, frames):
            counted.append(size + frames * FRAME_BYTES)
            descriptors.add(descriptor)
            super().read(descriptor, size, frames)

    monkeypatch.setattr(transport_module, "Unread", Watched)

    async def busy():
        with listening() as (transport, address, keys, receiver):
            transport.serve(receiver)
            client = await asyncio.to_thread(RawClient, address, keys.public, new_pair())
            for _ in range(number):
                client.send(b"x" * size)
            while len(receiver.sentences) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            [descriptor] = descriptors
            came = bytes_received(descriptor)
            assert sum(counted) == number * (size + FRAME_BYTES)
            assert came - GREETING_BYTES <= sum(counted) <= came + 7 * number
            client.close()

    asyncio.run(asyncio.wait_for(busy(), PATIENCE_S))
