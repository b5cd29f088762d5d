"""Connections over which messages come that do not end."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from malletrain.daemon import transport
from malletrain.daemon.transport import Transport
from malletrain.daemon.unread import (
    BEATS_BYTES_PER_S,
    FRAME_BYTES,
    GREETING_BYTES,
    MOST_BYTES,
    MOST_OF_ALL_BYTES,
    Unread,
    bytes_received,
)
from malletrain.identity.keys import new_pair
from malletrain.protocol import messages
from malletrain.protocol.wire import encode
from tests.malletrain.daemon.raw_curve import RawClient
from tests.waiting import PATIENCE_S

MB = 1_000_000


@pytest.mark.parametrize(
    ("came", "read", "age", "cut"),
    [
        (GREETING_BYTES + MOST_BYTES, 0, 0.0, False),
        (GREETING_BYTES + MOST_BYTES + 1, 0, 0.0, True),
        (GREETING_BYTES + MOST_BYTES + 1, 1, 0.0, False),
        (10 * MOST_BYTES, 10 * MOST_BYTES, 0.0, False),
        (GREETING_BYTES + MOST_BYTES + int(30 * 86400 * BEATS_BYTES_PER_S), 0, 30 * 86400.0, False),
        (GREETING_BYTES + MOST_BYTES + 1, 0, 30 * 86400.0, False),
    ],
)
def test_what_counts_is_what_came_and_was_not_read(came, read, age, cut):
    of = Unread(lambda descriptor: came)
    of.began(7, 100.0)
    of.read(7, read, 0)
    assert of.too_much(100.0 + age) == ([7] if cut else [])
    of.ended(7)
    assert of.too_much(100.0 + age) == []


def test_of_all_together_who_has_most_goes_until_there_is_room():
    size = MOST_OF_ALL_BYTES // 10
    waiting = {descriptor: size + descriptor + GREETING_BYTES for descriptor in range(12)}
    of = Unread(waiting.__getitem__)
    for descriptor in waiting:
        of.began(descriptor, 0.0)
    assert of.too_much(0.0) == [11, 10, 9]
    of.read(11, size, 0)
    of.read(10, size, 0)
    of.read(9, size, 0)
    assert of.too_much(0.0) == []


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
    def turn(self):
        yield

    def message(self, peer, who, message, size):
        self.heard.append(message)

    def invalid(self, sentence):
        self.sentences.append(sentence)

    def disconnected(self, peer):
        self.heard.append("gone")


@contextlib.contextmanager
def listening():
    keys, receiver = new_pair(), Receiver()
    made = Transport(keys, lambda key: "stranger:one")
    try:
        yield made, made.bind("tcp://127.0.0.1:0"), keys, receiver
    finally:
        made.stop()


def test_a_message_that_does_not_end_ends_its_connection_and_others_go_on():
    async def busy():
        with listening() as (made, address, keys, receiver):
            made.serve(receiver)
            fair = await asyncio.to_thread(RawClient, address, keys.public, new_pair())
            bad = await asyncio.to_thread(RawClient, address, keys.public, new_pair())

            def endless():
                with contextlib.suppress(OSError):
                    for _ in range(20 * MOST_BYTES // MB):
                        bad.send(bytes(MB), more=True)
                    return False
                return True

            cut = asyncio.ensure_future(asyncio.to_thread(endless))
            while not cut.done():
                made.end_unreadable()
                await asyncio.sleep(0.01)
            assert await cut, "all of it was taken"
            [sentence] = receiver.sentences
            assert "A message without an end filled memory" in sentence
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


@pytest.mark.parametrize("size", [1, 300, 100_000])
def test_what_was_read_is_counted_as_the_system_counts_it(monkeypatch, size):
    """Never less than came, and more by what a frame may have around it at most."""
    number, counted, descriptors = 2000 if size < 1000 else 50, [], set()

    class Watched(Unread):
        def read(self, descriptor, size, frames):
            counted.append(size + frames * FRAME_BYTES)
            descriptors.add(descriptor)
            super().read(descriptor, size, frames)

    monkeypatch.setattr(transport, "Unread", Watched)

    async def busy():
        with listening() as (made, address, keys, receiver):
            made.serve(receiver)
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
