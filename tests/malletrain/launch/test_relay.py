"""The relay when there are too many connections: it neither spins nor forgets who waits."""

import contextlib
import errno
import os
import socket
import time

import pytest
import zmq

from malletrain.launch import round_store
from malletrain.launch.listeners import USER_ADDRESS, UserListener, listener_pair
from malletrain.launch.round_store import RoundKeys, ServingRelay
from malletrain.memory.folder import MemoryFolder
from malletrain.memory.keeper import Keeper
from malletrain.protocol import host_listener
from tests.waiting import NEVER_S, PATIENCE_S, until

KEYS = RoundKeys(b"secret", "j1/1")


@pytest.fixture
def serving():
    """A relay, and the listener of what it serves."""
    listeners = listener_pair()
    inside = socket.socket(fileno=listeners[1].duplicate())
    inside.settimeout(PATIENCE_S)
    made = ServingRelay(listeners, KEYS, USER_ADDRESS)
    yield made, inside
    made.close()
    inside.close()


def served(one, inside):
    """A caller is let in and its bytes arrive."""
    with socket.create_connection((USER_ADDRESS, one.local_port)) as call:
        call.sendall(b"x")
        own = inside.accept()[0]
        own.settimeout(PATIENCE_S)
        assert own.recv(1) == b"x"
        own.close()


def test_while_descriptors_lack_the_relay_rests_and_then_lets_in_who_waited(serving, monkeypatch):
    one, inside = serving
    accept, tried, short = UserListener.accept, [], True

    def accepted(listener):
        tried.append(time.monotonic())
        if short:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    monkeypatch.setattr(UserListener, "accept", accepted)
    with socket.create_connection((USER_ADDRESS, one.local_port)) as call:
        call.sendall(b"x")
        until(lambda: len(tried) >= 4, "it tries again")
        assert tried[3] - tried[0] >= 0.29, "and rests in between, however slow this machine is"
        short = False
        own = inside.accept()[0]
        own.settimeout(PATIENCE_S)
        assert own.recv(1) == b"x"
        own.close()


def test_no_more_connections_than_any_job_has(serving, monkeypatch):
    one, inside = serving
    monkeypatch.setattr(round_store, "MAX_CONNECTIONS", 6)  # two for each caller
    calls = [socket.create_connection((USER_ADDRESS, one.local_port)) for _ in range(5)]
    try:
        own = [inside.accept()[0] for _ in range(3)]
        inside.settimeout(0.3)
        with pytest.raises(TimeoutError):
            inside.accept()
        inside.settimeout(PATIENCE_S)
        for call in own:
            call.close()
        waited = [inside.accept()[0] for _ in range(2)]
        assert len(waited) == 2, "those that waited come in when others have gone"
    finally:
        for call in calls:
            call.close()
    for call in waited:
        call.close()
    served(one, inside)


class Clock:
    """The clock of the listener, which the test moves."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s


def test_strangers_that_hold_the_port_are_sent_off_and_members_get_in(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(host_listener, "MAX_UNAUTHENTICATED", 6)
    monkeypatch.setattr(host_listener, "_HANDSHAKE_MS", int(NEVER_S * 1000))
    monkeypatch.setattr(host_listener, "time", clock)
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.curve_server = True
    router.curve_secretkey, router.curve_publickey = KEYS.server_secret, KEYS.server_public
    listener = host_listener.HostListener(router, USER_ADDRESS)
    strangers, events = [], []
    parsed = host_listener.parse_monitor_message

    def tapped(frames):
        events.append(parsed(frames)["event"])
        return parsed(frames)

    monkeypatch.setattr(host_listener, "parse_monitor_message", tapped)

    def event_count(event):
        listener.read_monitor()
        return events.count(event)

    def come_in(count):
        """``count`` strangers more connect, and the listener has noticed them."""
        before = event_count(zmq.EVENT_ACCEPTED)
        for _ in range(count):
            strangers.append(socket.create_connection((USER_ADDRESS, listener.port)))
        until(lambda: event_count(zmq.EVENT_ACCEPTED) == before + count, "they are noticed")

    def refused():
        try:
            socket.create_connection((USER_ADDRESS, listener.port)).close()
        except ConnectionRefusedError:
            return True
        return False

    try:
        come_in(5)
        assert listener.open
        come_in(1)
        assert not listener.open, "nobody is let in any more"
        until(refused, "nobody can connect")
        clock.now_s = 2 * NEVER_S
        dealer.curve_serverkey = KEYS.server_public
        dealer.curve_secretkey, dealer.curve_publickey = KEYS.client_secret, KEYS.client_public
        dealer.connect(f"tcp://{USER_ADDRESS}:{listener.port}")
        dealer.send(b"hello")
        until(
            lambda: event_count(zmq.EVENT_HANDSHAKE_SUCCEEDED) and router.poll(0),
            "a member comes in all the same",
        )
        assert router.recv_multipart()[1] == b"hello"
        come_in(5)
        assert listener.open, "the member is none of them"
        come_in(1)
        assert not listener.open, "only strangers count"
    finally:
        for call in strangers:
            call.close()
        listener.close()
        context.destroy(linger=0)


@contextlib.contextmanager
def opened(kind, folder):
    """A part of a launcher that listens for other hosts; yields its port."""
    if kind == "relay":
        relay = ServingRelay(listener_pair(), KEYS, USER_ADDRESS)
        yield relay.port
        relay.close()
    else:
        keeper = Keeper(MemoryFolder(folder, 1 << 20), b"secret", "j1", USER_ADDRESS)
        yield int(keeper.address.rpartition(":")[2])
        keeper.close()


@pytest.mark.parametrize("kind", ["relay", "keeper"])
def test_the_port_opens_again_although_it_was_taken_for_a_while(kind, tmp_path, monkeypatch):
    """When strangers hold the port it is closed. Nothing tells when it is free again."""
    monkeypatch.setattr(host_listener, "MAX_UNAUTHENTICATED", 4)
    reopen, tried = host_listener.HostListener.reopen, []

    def counted(listener):
        tried.append(reopen(listener))
        return tried[-1]

    monkeypatch.setattr(host_listener.HostListener, "reopen", counted)

    def refused():
        try:
            strangers.append(socket.create_connection((USER_ADDRESS, port)))
        except ConnectionRefusedError:
            return True
        return False

    strangers = []
    with opened(kind, tmp_path) as port, socket.socket() as other:
        until(refused, "nobody is let in any more")
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((USER_ADDRESS, port))
        other.listen()
        for stranger in strangers:
            stranger.close()
        strangers.clear()
        until(lambda: tried.count(False) >= 3, "it tries to open again while another has the port")
        assert not any(tried)
        other.close()
        until(lambda: any(tried), "it is open again")
        assert not refused()
        for stranger in strangers:
            stranger.close()


class Moved:
    """A router whose host loses the address at which it listens."""

    def __init__(self, router):
        self.router, self.gone, self.bound = router, "", []

    def __getattr__(self, name):
        return getattr(self.router, name)

    def bind(self, endpoint):
        if endpoint == self.gone:
            raise zmq.ZMQError(errno.EADDRNOTAVAIL)
        self.router.bind(endpoint)
        self.bound.append(endpoint)


def test_a_listener_whose_address_is_gone_opens_at_all_addresses(monkeypatch):
    monkeypatch.setattr(host_listener, "MAX_UNAUTHENTICATED", 2)
    context = zmq.Context()
    router = Moved(context.socket(zmq.ROUTER))
    router.router.curve_server = True
    router.router.curve_secretkey = KEYS.server_secret
    router.router.curve_publickey = KEYS.server_public
    listener = host_listener.HostListener(router, USER_ADDRESS)

    def is_open():
        listener.read_monitor()
        return listener.open

    try:
        strangers = [socket.create_connection((USER_ADDRESS, listener.port)) for _ in range(2)]
        until(lambda: not is_open(), "strangers hold the port")
        router.gone = f"tcp://{USER_ADDRESS}:{listener.port}"
        for stranger in strangers:
            stranger.close()
        until(is_open, "it is open again")
        assert router.bound[-1] == f"tcp://*:{listener.port}"
        socket.create_connection((USER_ADDRESS, listener.port)).close()
    finally:
        listener.close()
        context.destroy(linger=0)


def test_the_rest_of_a_stream_that_has_ended_begins_no_other(serving):
    """The store would take the middle of a message for the beginning of one."""
    relay, inside = serving
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    KEYS.call(dealer)
    dealer.connect(f"tcp://{USER_ADDRESS}:{relay.port}")
    try:
        dealer.send_multipart([b"\0\0\0\1", b"begun"])
        own = inside.accept()[0]
        own.settimeout(PATIENCE_S)
        assert own.recv(5) == b"begun"
        own.close()
        assert dealer.poll(PATIENCE_S * 1000)
        assert dealer.recv_multipart() == [b"\0\0\0\1", b""]
        dealer.send_multipart([b"\0\0\0\1", b"the rest"])
        dealer.send_multipart([b"\0\0\0\2", b"another"])
        other = inside.accept()[0]
        other.settimeout(PATIENCE_S)
        assert other.recv(7) == b"another"
        other.close()
    finally:
        context.destroy(linger=0)
