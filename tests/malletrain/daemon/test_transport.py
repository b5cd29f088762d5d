"""The daemon's socket when connections come and go."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest
import zmq

from malletrain.daemon.server import transport as transport_module
from malletrain.daemon.server.sender_limits import MAX_MESSAGES, ReceiveQueue
from malletrain.daemon.server.transport import FRAMES, TURN_S, Transport
from malletrain.identity.keys import new_pair
from malletrain.protocol import messages
from malletrain.protocol.wire import MAX_LOGIN_BYTES, MAX_REQUEST_BYTES, encode
from tests.malletrain.daemon.raw_curve import RawClient
from tests.waiting import PATIENCE_S, until

MANY = 2050
"""More connections than ZeroMQ keeps ends of for a reader: its thread then waits for ever."""


class Deaf:
    """A receiver that keeps what it is told."""

    def __init__(self):
        self.peers, self.ended, self.turns, self.let_go = [], [], [], []

    @contextlib.contextmanager
    def batch(self):
        before = len(self.peers)
        yield
        self.turns.append(len(self.peers) - before)

    def message(self, peer, who, message, size, key):
        self.peers.append(peer)

    def invalid(self, sentence):
        raise AssertionError(sentence)

    def withdrawn(self, peer):
        raise AssertionError(peer)

    def dropped(self, who, number):
        self.let_go.append(who)

    def disconnected(self, peer):
        self.ended.append(peer)


@pytest.fixture
def transport():
    return Transport(new_pair(), lambda key: None)


def come_and_go(address, count):
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    for _ in range(count):
        socket.create_connection((host, int(port))).close()


def test_it_closes_after_any_number_of_ends_that_nobody_looked_at(transport):
    async def busy():
        address = transport.bind("tcp://127.0.0.1:0")
        transport.serve(receiver)
        come_and_go(address, MANY)  # the loop does not run meanwhile

    receiver = Deaf()
    asyncio.run(busy())
    closing = threading.Thread(target=transport.stop, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive(), "the daemon hangs at its end"
    assert receiver.ended == []  # none of them had sent a message


def test_the_end_of_a_connection_is_told_with_the_peer_that_spoke_over_it():
    keys, receiver = new_pair(), Deaf()
    transport = Transport(keys, lambda key: "client:ann")

    async def until(condition):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def busy():
        address, clients = transport.bind("tcp://127.0.0.1:0"), []
        transport.serve(receiver)
        with zmq.Context() as context:
            for number in range(3):
                clients.append(client := context.socket(zmq.DEALER))
                own = new_pair()
                client.linger, client.curve_serverkey = 0, keys.public.encode()
                client.curve_publickey, client.curve_secretkey = (
                    own.public.encode(),
                    own.secret.encode(),
                )
                client.connect(address)
                client.send_multipart(encode(messages.Heartbeat("boot")))
                await until(lambda: len(receiver.peers) > number)  # noqa: B023
            assert receiver.ended == []
            clients[1].close()
            await until(lambda: receiver.ended)
            assert receiver.ended == [receiver.peers[1]]
            clients[2].close()
            await until(lambda: len(receiver.ended) == 2)
            assert receiver.ended == receiver.peers[1:]
            clients[0].close()

    try:
        asyncio.run(busy())
    finally:
        transport.stop()


def test_who_comes_before_the_keys_are_known_is_let_in_once_they_are():
    keys, own, receiver = new_pair(), new_pair(), Deaf()
    name_of, serving, early_keys = {}, [], []

    def who(key):
        early_keys.extend(() if serving else [key])
        return name_of.get(key)

    transport = Transport(keys, who)

    async def busy():
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.linger, client.curve_serverkey = 0, keys.public.encode()
            client.curve_publickey, client.curve_secretkey = (
                own.public.encode(),
                own.secret.encode(),
            )
            monitor = client.get_monitor_socket(zmq.EVENT_CONNECTED)
            try:
                client.connect(transport.bind("tcp://127.0.0.1:0"))
                client.send_multipart(encode(messages.Heartbeat("b")))
                assert await asyncio.to_thread(monitor.poll, 1000 * PATIENCE_S)
            finally:
                client.disable_monitor()
                monitor.close()
            name_of[own.public] = "lease:l1"
            transport.serve(receiver)
            serving.append(True)
            while not receiver.peers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    try:
        asyncio.run(asyncio.wait_for(busy(), PATIENCE_S))
    finally:
        transport.stop()
    assert not early_keys


def test_what_is_sent_after_its_end_is_heard_by_nobody(transport):
    transport.bind("tcp://127.0.0.1:0")
    transport.stop()
    assert not transport.send(b"peer", messages.Alive("boot"))


def test_however_much_is_sent_in_one_turn_it_looks_for_messages_once(transport):
    async def busy():
        transport.bind("tcp://127.0.0.1:0")
        transport.serve(Deaf())
        await asyncio.sleep(0)
        loop, due = asyncio.get_running_loop(), []
        soon = loop.call_soon
        loop.call_soon = lambda what, *rest, **options: (
            due.append(what) or soon(what, *rest, **options)
        )
        for _ in range(50):
            transport.send(b"nobody", messages.Goodbye("Nobody is there."))
        del loop.call_soon
        transport.stop()
        return len(due)

    assert asyncio.run(busy()) == 1


class Slow(Deaf):
    """A receiver that takes as long for each message as a turn lasts."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def message(self, peer, who, message, size, key):
        self.heard.append(who)
        time.sleep(TURN_S)


class Odd(Slow):
    """A receiver that keeps what it is told of messages that are none."""

    def __init__(self):
        super().__init__()
        self.sentences = []

    def invalid(self, sentence):
        self.sentences.append(sentence)


def test_of_a_message_of_very_many_frames_only_the_first_are_kept(monkeypatch):
    server, own, receiver, frame_counts = new_pair(), new_pair(), Odd(), []

    class Watched(ReceiveQueue):
        def put(self, sender, message, size):
            frame_counts.append(len(message.frames))
            return super().put(sender, message, size)

    monkeypatch.setattr(transport_module, "ReceiveQueue", Watched)
    transport = Transport(server, lambda key: "client:ann")

    async def busy():
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.linger, client.curve_serverkey = 0, server.public.encode()
            client.curve_publickey, client.curve_secretkey = (
                own.public.encode(),
                own.secret.encode(),
            )
            client.connect(transport.bind("tcp://127.0.0.1:0"))
            for _ in range(3):  # handled in a turn each, while the next message waits
                client.send_multipart(encode(messages.Heartbeat("boot")))
            client.send_multipart([b""] * 5000)
            transport.serve(receiver)
            while not receiver.sentences:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    try:
        asyncio.run(asyncio.wait_for(busy(), PATIENCE_S))
    finally:
        transport.stop()
    assert frame_counts
    assert set(frame_counts) == {FRAMES}
    assert "this one has 5000" in receiver.sentences[0]


@pytest.mark.parametrize(
    ("who", "size", "heard"),
    [
        ("lease:l1", MAX_REQUEST_BYTES, True),
        ("client:ann", MAX_LOGIN_BYTES, True),
        ("client:ann", MAX_REQUEST_BYTES, False),
        ("unauthenticated:one", 1000, True),
        ("unauthenticated:one", MAX_LOGIN_BYTES, False),
    ],
)
def test_how_large_a_message_may_be_depends_on_whose_it_is(who, size, heard):
    server, own, receiver = new_pair(), new_pair(), Odd()
    transport = Transport(server, lambda key: who)
    chunk = messages.LogChunk("j1", 1, "rank0", "n0", 0, bytes(size))

    async def busy():
        address = transport.bind("tcp://127.0.0.1:0")
        transport.serve(receiver)
        client = await asyncio.to_thread(RawClient, address, server.public, own)
        tag, body = encode(chunk)
        client.send(tag, more=True)
        client.send(body)
        while not (receiver.sentences or receiver.heard):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        client.close()

    try:
        asyncio.run(asyncio.wait_for(busy(), PATIENCE_S))
    finally:
        transport.stop()
    assert (receiver.heard == [who]) is heard
    assert heard or "the limit is" in receiver.sentences[0]


@pytest.mark.parametrize("flooder", ["client:ann", "unauthenticated:one"])
def test_who_floods_keeps_nobody_waiting_and_fills_no_memory(flooder):
    server, ann, bob = new_pair(), new_pair(), new_pair()
    names = {ann.public: flooder, bob.public: "lease:l1"}
    transport, receiver = Transport(server, names.get), Slow()
    over = threading.Event()

    def connected(context, own):
        client = context.socket(zmq.DEALER)
        client.linger, client.curve_serverkey = 0, server.public.encode()
        client.curve_publickey, client.curve_secretkey = own.public.encode(), own.secret.encode()
        client.connect(address)
        return client

    def flood():
        with zmq.Context() as context:
            client = connected(context, ann)
            frames = encode(messages.Heartbeat("boot"))
            while not over.is_set():
                if client.poll(10, zmq.POLLOUT):
                    client.send_multipart(frames)
            client.close()

    async def busy():
        transport.serve(receiver)
        with zmq.Context() as context:
            await asyncio.to_thread(client_waits)
            client = connected(context, bob)
            client.send_multipart(encode(messages.Heartbeat("boot")))
            before = len(receiver.heard)
            while "lease:l1" not in receiver.heard:  # noqa: ASYNC110
                await asyncio.sleep(TURN_S)
            assert receiver.heard.index("lease:l1") - before < MAX_MESSAGES, "it had its turn"
            client.close()
        over.set()

    def client_waits():
        until(lambda: receiver.let_go, "more waits than may")

    address = transport.bind("tcp://127.0.0.1:0")
    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        asyncio.run(busy())
    finally:
        over.set()
        flooding.join()
        transport.stop()
    assert set(receiver.let_go) == {flooder}


@pytest.mark.parametrize("served", [False, True])
def test_it_closes_while_strangers_connect_all_the_time(transport, served):
    """ZeroMQ's thread never waits with the lock that the end needs, whoever reads its events."""
    over = threading.Event()

    def flood(address):
        while not over.is_set():
            with contextlib.suppress(OSError):
                come_and_go(address, 50)

    async def busy():
        transport.serve(Deaf())
        await asyncio.sleep(0)

    address = transport.bind("tcp://127.0.0.1:0")
    come_and_go(address, MANY)
    floods = [threading.Thread(target=flood, args=(address,)) for _ in range(2)]
    for thread in floods:
        thread.start()
    if served:
        asyncio.run(busy())
    closing = threading.Thread(target=transport.stop, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    over.set()
    for thread in floods:
        thread.join()
    assert not closing.is_alive(), "the daemon hangs at its end"


def test_other_work_has_its_turn_while_strangers_connect(transport, monkeypatch):
    """However many connections end, a look at them takes one turn."""
    rounds, read_in = [0], set()
    read = transport_module.recv_monitor_message

    def counted(*arguments):
        read_in.add(rounds[0])
        return read(*arguments)

    async def other_work():
        transport.serve(Deaf())
        for number in range(1000):
            rounds[0] = number
            await asyncio.sleep(0)

    monkeypatch.setattr(transport_module, "recv_monitor_message", counted)
    monkeypatch.setattr(transport_module, "TURN_S", 1e-5)
    come_and_go(transport.bind("tcp://127.0.0.1:0"), 300)
    asyncio.run(other_work())
    transport.stop()
    assert len(read_in) >= 3
