"""The store of a round against strangers: real stores, real sockets, clients without the key."""

import os
import select
import socket
import threading
from datetime import timedelta

import pytest
import zmq

pytest.importorskip("torch")

from torch.distributed import TCPStore

from malletrain.launch import round_store
from malletrain.launch.listeners import SIGNED_ADDRESS, USER_ADDRESS
from malletrain.launch.round_store import ReachedStore, ServedStore
from tests.waiting import PATIENCE_S, readable, until

KEY = "5e" * 32
MANY = 200
LIMIT = 100 << 20
GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f" + b"\x03\x01" + b"CURVE".ljust(52, b"\0")
LARGE = b"\x06" + (2 << 30).to_bytes(8, "big")
"""Announces a command of 2 GiB."""
CHUNK = b"\x00\x00\x00\x01k" * 4096


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setenv("MALLETRAIN_JOB_KEY", KEY)
    store = ServedStore("j1", 1, USER_ADDRESS)
    yield store
    store.close()


@pytest.fixture
def reach(served):
    """Call it with the names of a round for its store; connected unless told otherwise."""
    made = []

    def connect(job="j1", generation=1):
        made.append(ReachedStore(job, generation, USER_ADDRESS, served.port))
        return made[-1]

    yield connect
    for one in made:
        one.close()


def connected(one):
    assert readable(one), one.trouble
    assert one.connected
    return one


def client(port):
    return TCPStore(USER_ADDRESS, port, is_master=False, wait_for_workers=False)


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_all_nodes_see_one_store(served, reach):
    other = client(connected(reach()).local_port)
    third = client(reach().local_port)
    served.store.set("from", "rank 0")
    assert other.get("from") == b"rank 0"
    assert [store.add("n", 1) for store in (other, third, served.store)] == [1, 2, 3]
    big = os.urandom(1 << 20)
    other.set("big", big)
    assert third.get("big") == big


def test_torch_2_7_has_its_older_store(monkeypatch):
    """Its newer one takes no open socket. Clients are those of any torch."""
    monkeypatch.setenv("MALLETRAIN_JOB_KEY", KEY)
    monkeypatch.setattr(round_store, "torch_release", lambda: (2, 7))
    served = ServedStore("j1", 1, USER_ADDRESS)
    far = ReachedStore("j1", 1, USER_ADDRESS, served.port)
    try:
        assert not served.store.libuvBackend
        other = client(connected(far).local_port)
        served.store.set("from", "rank 0")
        assert other.get("from") == b"rank 0"
        other.append("list", "a")
        assert served.store.multi_get(["from", "list"]) == [b"rank 0", b"a"]
    finally:
        far.close()
        served.close()


def test_a_wait_ends_when_somebody_sets_the_key(served, reach):
    other = client(connected(reach()).local_port)
    waited = threading.Thread(target=lambda: other.wait(["late"]), daemon=True)
    waited.start()
    served.store.set("late", "x")
    waited.join(PATIENCE_S)
    assert not waited.is_alive()


def test_the_end_of_the_store_ends_its_clients_at_once(served, reach):
    way = connected(reach())
    other = client(way.local_port)
    failed = []

    def wait():
        try:
            other.wait(["never"])
        except RuntimeError as error:
            failed.append(error)

    waited = threading.Thread(target=wait, daemon=True)
    waited.start()
    served.close()
    waited.join(PATIENCE_S)
    assert failed
    until(lambda: way.over, "the way is over too")


@pytest.mark.parametrize("names", [("j2", 1), ("j1", 2)], ids=["job", "round"])
def test_the_key_of_another_job_or_round_opens_nothing(served, reach, names):
    """The others' key is tried for as long as the right one takes to be let in, ten times over."""
    wrong = reach(*names)
    for _ in range(10):
        connected(reach()).close()
    assert not wrong.connected


def test_a_client_whose_own_key_is_not_the_rounds_is_turned_away(served):
    """The server's public half is no secret by its nature: a client needs more than that."""
    from malletrain.launch.round_store import RoundKeys

    keys = RoundKeys(bytes.fromhex(KEY), "j1/1")
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        public, secret = zmq.curve_keypair()
        stranger.curve_serverkey = keys.server_public
        stranger.curve_publickey, stranger.curve_secretkey = public, secret
        refused = zmq.EVENT_HANDSHAKE_FAILED_AUTH
        monitor = stranger.get_monitor_socket(refused | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        stranger.connect(f"tcp://{USER_ADDRESS}:{served.port}")
        assert monitor.poll(int(PATIENCE_S * 1000))
        event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
        assert event == refused
        stranger.disable_monitor()
        monitor.close(0)


def test_a_stranger_can_neither_list_nor_grow_nor_spoil_the_store(served, reach):
    other = client(connected(reach()).local_port)
    served.store.set("here", "x")
    before, grown = served.store.num_keys(), resident()
    limit = timedelta(seconds=1)
    with pytest.raises(RuntimeError):
        TCPStore(USER_ADDRESS, served.port, is_master=False, wait_for_workers=False, timeout=limit)
    strangers = []
    try:
        for number in range(MANY):
            call = socket.create_connection((USER_ADDRESS, served.port))
            strangers.append(call)
            call.setblocking(False)
            try:  # as a client of a TCPStore, as one of ZeroMQ, as nobody
                hello = (CHUNK, b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0CURVE", os.urandom(4096))
                call.send(hello[number % 3] * 16)
            except BlockingIOError:
                pass
        # Each is disconnected or gets no answer of a store. Members are served all the while.
        assert other.get("here") == b"x"
        later = connected(reach())
        assert client(later.local_port).add("n", 1) == 1
        until(
            lambda: all(not readable(c, 0) or not store_answer(c) for c in strangers[::3]),
            "nobody who speaks the store's language is answered",
        )
    finally:
        for call in strangers:
            call.close()
    assert served.store.num_keys() == before + 1
    assert resident() - grown < LIMIT


def test_a_stranger_who_announces_a_large_frame_is_hung_up_on(served, reach):
    grown, part = resident(), bytes(1 << 20)

    def pour():
        for _ in range(2 * LIMIT // len(part)):
            stranger.sendall(part)

    with socket.create_connection((USER_ADDRESS, served.port)) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.sendall(GREETING + LARGE)
        with pytest.raises(ConnectionError):
            pour()
    assert resident() - grown < LIMIT
    other = client(connected(reach()).local_port)
    assert other.add("n", 1) == 1


def store_answer(call):
    try:
        return b"CURVE" not in (data := call.recv(1 << 16)) and data[:1] != b"\xff" and data
    except OSError:
        return b""


def test_the_store_itself_takes_no_connection_of_another_process(served):
    with socket.socket() as stranger:
        stranger.setblocking(False)
        stranger.connect_ex((SIGNED_ADDRESS, served.local_port))
        for _ in range(3):  # those that are let in pass it by
            client(served.local_port).add("n", 1)
        poll = select.poll()
        poll.register(stranger, select.POLLOUT)
        assert not poll.poll(0), "a stranger is connected to the store"


def test_without_the_jobs_secret_there_is_a_sentence(monkeypatch):
    for value in ("", "no hexadecimal"):
        monkeypatch.setenv("MALLETRAIN_JOB_KEY", value)
        with pytest.raises(ValueError, match=r"MALLETRAIN_JOB_KEY .* same version"):
            ServedStore("j1", 1, USER_ADDRESS)
