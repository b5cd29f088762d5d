"""The connections by themselves: what is refused, and what a handler's errors become."""

import asyncio
import logging
import socket

import pytest

from malletrain.streams import connection, server
from malletrain.streams.connection import (
    CallFailed,
    ConnectionLost,
    KeyRefused,
    PeerConnections,
    StreamError,
)
from malletrain.streams.server import StreamServer
from tests.waiting import PATIENCE_S

KEY = b"a key"


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(connection, "CONNECT_S", PATIENCE_S)
    monkeypatch.setattr(server, "HANDSHAKE_S", PATIENCE_S)


def call(op, body=(), key=KEY, protocol="tests", host="127.0.0.1", **arguments):
    """One request to a server of this process. Return its head and its body."""

    def double(number=0, body=b""):
        return {"number": 2 * number}, [bytes(body), b"!"]

    def lost():
        raise ConnectionLost("Another node is gone.")

    async def run():
        listener = None
        if ":" in host:
            listener = socket.create_server((host, 0), family=socket.AF_INET6)
            listener.setblocking(False)
        made = StreamServer(
            {"double": double, "lost": lost, "defect": lambda: 1 / 0},
            KEY,
            "tests",
            listener=listener,
        )
        address = made.address
        if listener is not None:
            address = f"[{host}]:{listener.getsockname()[1]}"
        peers = PeerConnections(key, protocol)
        try:
            return await peers.at(address).call(op, body, **arguments)
        finally:
            peers.close()
            made.close()

    return asyncio.run(run())


def test_a_request_with_a_body():
    head, body = call("double", [b"ab", b"cd"], number=21)
    assert (head["number"], bytes(body)) == (42, b"abcd!")


def test_an_address_of_the_newer_internet_protocol():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no loopback of IPv6")
    assert call("double", number=1, host="::1")[0]["number"] == 2


@pytest.mark.parametrize(("key", "protocol"), [(b"another", "tests"), (KEY, "another protocol")])
def test_another_key_or_protocol_is_refused(key, protocol):
    with pytest.raises(KeyRefused, match="does not accept this client's key"):
        call("double", key=key, protocol=protocol)


def test_errors_of_a_handler_are_sentences(caplog):
    with pytest.raises(CallFailed, match="'what' is no request of tests") as refusal:
        call("what")
    assert refusal.value.code == "refused"
    with pytest.raises(CallFailed, match="Another node is gone") as refusal:
        call("lost")
    assert refusal.value.code == "unavailable"
    caplog.set_level(logging.CRITICAL, "malletrain.streams")
    with pytest.raises(CallFailed, match="defect failed: ZeroDivisionError"):
        call("defect")


def test_closed_connections_say_so():
    async def run():
        peers = PeerConnections(KEY, "tests")
        peers.close()
        peers.at("127.0.0.1:1")

    with pytest.raises(StreamError, match="This client is closed"):
        asyncio.run(run())


def test_a_request_that_is_cancelled_before_the_handshake_leaves_no_socket_open():
    """As one of several members that are asked at once, when another one answers first."""

    async def run():
        loop = asyncio.get_running_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        peers = PeerConnections(KEY, "tests")
        request = peers.at(f"127.0.0.1:{listener.getsockname()[1]}").call("double")
        asking = asyncio.ensure_future(request)
        sock, _ = await loop.sock_accept(listener)
        sock.setblocking(False)
        for _ in range(5):  # it waits for the handshake
            await asyncio.sleep(0)
        asking.cancel()
        async with connection.time_limit(PATIENCE_S):
            assert await loop.sock_recv(sock, 1) == b""
        sock.close()
        listener.close()
        peers.close()

    asyncio.run(run())


def test_a_server_listens_at_an_address_of_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("This machine has no IPv6.")

    async def run():
        peers = PeerConnections(KEY, "tests")
        for host in ("::1", "[::1]"):
            made = StreamServer({"one": lambda: {"number": 1}}, KEY, "tests", host)
            port = made.address.rpartition(":")[2]
            assert made.address == f"[::1]:{port}"
            for address in (made.address, f"::1:{port}"):
                assert (await peers.at(address).call("one"))[0]["number"] == 1
            made.close()
        peers.close()

    asyncio.run(run())
