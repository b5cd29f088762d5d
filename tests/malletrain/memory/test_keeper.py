"""From one node's memory to another's: whole and right, or not at all; and nobody hangs."""

import contextlib
import os
import threading
import zlib
from pathlib import Path

import msgspec
import pytest
import zmq

from malletrain.memory.folder import MemoryFolder, private_folder
from malletrain.memory.keeper import Keeper
from malletrain.memory.keeper_messages import (
    PIECE,
    Answer,
    KeeperRequest,
    keys,
    remove_queue_limits,
)
from malletrain.memory.peers import PeerError, RemoteKeeper
from tests.waiting import PATIENCE_S, until

SECRET = b"s" * 32
NAME = "0123456789abcdef/3-40-1-0.pt"
LIMIT = 16 << 20
DATA = os.urandom(3 * PIECE + 17)


class Node:
    """A node's memory and its keeper."""

    def __init__(self, base, name):
        self.folder = MemoryFolder(private_folder(name, base), LIMIT)
        self.keeper = Keeper(self.folder, SECRET, "j1", "127.0.0.1")

    def peer(self, **options):
        return RemoteKeeper(self.keeper.address, SECRET, "j1", **options)

    def files(self):
        return {p.name: p.read_bytes() for p in self.folder.path.rglob("*") if p.is_file()}


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path, "n1")
    yield node
    node.keeper.close()


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(DATA)
    return path


def test_what_is_handed_over_can_be_fetched(node, source):
    got = bytearray(len(DATA))

    def put(at, data):
        got[at : at + len(data)] = data

    with node.peer() as peer:
        assert peer.push(source, NAME) == len(DATA)
        assert node.files() == {"3-40-1-0.pt": DATA}
        assert peer.fetch(NAME, [(0, len(DATA))], put) == len(DATA)
        assert bytes(got) == DATA
        pieces = [(PIECE - 5, 10), (7, 2 * PIECE)]
        got[:] = bytes(len(DATA))
        assert peer.fetch(NAME, pieces, put) == 10 + 2 * PIECE
        assert bytes(got[7 : 7 + 2 * PIECE]) == DATA[7 : 7 + 2 * PIECE]


def threads():
    """Number → name, of all that this process has."""
    names = {}
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            names[path.parent.name] = path.read_text()
    return names


def test_a_node_of_which_nobody_wants_anything_costs_a_port_and_a_thread_that_sleeps(
    tmp_path, source
):
    first = Node(tmp_path, "n0")
    with first.peer() as peer:  # the first monitor in a process makes a context that stays
        peer.push(source, NAME)
    first.keeper.close()
    before = threads()

    def new():
        """Those of ZeroMQ since; whose end is still to come, or comes now, was there before."""
        return [n for n, name in threads().items() if name.startswith("ZMQ") and n not in before]

    node = Node(tmp_path, "n1")
    try:
        assert not new()
        with node.peer() as peer:
            peer.push(source, NAME)
        assert node.files() == {"3-40-1-0.pt": DATA}
        until(lambda: len(new()) == 2, "those of the keeper are left")
    finally:
        node.keeper.close()
    until(lambda: not new(), "none is left")
    idle = Node(tmp_path, "n2")
    idle.keeper.close()
    idle.keeper.close()
    assert idle.keeper._port.fileno() < 0  # noqa: SLF001 (somebody else may have its number now)
    assert not idle.keeper._thread.is_alive()  # noqa: SLF001


def test_many_at_a_time(node, source):
    def push(number):
        with node.peer() as peer:
            peer.push(source, f"0123456789abcdef/3-40-1-{number}.pt")

    threads = [threading.Thread(target=push, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert node.files() == {f"3-40-1-{n}.pt": DATA for n in range(3)}


def test_who_has_not_the_jobs_secret_is_not_let_in(node, source):
    for secret, job in ((b"t" * 32, "j1"), (SECRET, "j2")):
        with (
            RemoteKeeper(node.keeper.address, secret, job) as stranger,
            pytest.raises(PeerError, match=r"is gone|key"),
        ):
            stranger.push(source, NAME)
    assert node.files() == {}


def test_a_full_memory_says_so_and_takes_nothing(node, tmp_path):
    large = tmp_path / "large"
    with open(large, "wb") as file:
        file.truncate(LIMIT + 1)
    with node.peer() as peer, pytest.raises(PeerError, match="does not fit into the memory"):
        peer.push(large, NAME)
    assert node.files() == {}


def test_what_is_promised_to_one_is_not_there_for_another(node, tmp_path):
    half = tmp_path / "half"
    with open(half, "wb") as file:
        file.truncate(LIMIT * 2 // 3)
    with Talk(node) as talk:
        talk.ask("begin", length=LIMIT * 2 // 3)
        with node.peer() as peer, pytest.raises(PeerError, match="does not fit"):
            peer.push(half, NAME)


def test_what_is_not_there_is_said(node):
    with node.peer() as peer, pytest.raises(PeerError, match="No such file"):
        peer.fetch(NAME, [(0, 10)], lambda at, data: None)
    with node.peer() as peer, pytest.raises(PeerError, match="no file of a snapshot"):
        peer.fetch("../../etc/passwd", [(0, 10)], lambda at, data: None)


class Talk:
    """A sender that may stop in the middle."""

    def __init__(self, node):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        keys(SECRET, "j1").call(self.socket)
        remove_queue_limits(self.socket)
        self.socket.connect(f"tcp://{node.keeper.address}")

    def ask(self, verb, data=b"", **fields):
        ask = KeeperRequest(1, verb, NAME, **fields)
        self.socket.send_multipart([msgspec.msgpack.encode(ask), data])
        assert self.socket.poll(int(PATIENCE_S * 1000))
        return msgspec.msgpack.decode(self.socket.recv_multipart()[0], type=Answer).trouble

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.destroy(linger=0)


WHOLE = [
    ("begin", b"", {"length": len(DATA)}),
    *(("write", DATA[at : at + PIECE], {"offset": at}) for at in range(0, len(DATA), PIECE)),
    ("end", b"", {"total": zlib.crc32(DATA)}),
]


@pytest.mark.parametrize("steps", range(len(WHOLE) + 1))
def test_a_sender_that_dies_at_any_moment_leaves_all_or_nothing(node, steps):
    with Talk(node) as talk:
        for verb, data, fields in WHOLE[:steps]:
            assert talk.ask(verb, data, **fields) == ""
    whole = steps == len(WHOLE)
    node.keeper.close()
    assert node.files() == ({"3-40-1-0.pt": DATA} if whole else {})


def test_what_does_not_arrive_as_it_was_sent_does_not_count(node):
    with Talk(node) as talk:
        talk.ask("begin", length=4)
        assert "out of turn" in talk.ask("write", b"abcd", offset=1)
        assert "was not begun" in talk.ask("write", b"abcd")
        talk.ask("begin", length=4)
        talk.ask("write", b"abcd")
        assert "did not arrive" in talk.ask("end", total=zlib.crc32(b"abce"))
        talk.ask("begin", length=4)
        assert "out of turn" in talk.ask("write", b"abcdefg")
        assert "does not know the request 'erase'" in (
            talk.ask("begin", length=1) or talk.ask("erase")
        )
    assert node.files() == {}


def test_a_node_that_goes_in_the_middle_is_noticed(node, source):
    """Nobody waits for its time to be up: it is an hour."""
    with node.peer() as peer:
        peer.push(source, NAME)
    endless = ((0, len(DATA)) for _ in iter(int, 1))
    with node.peer(silence_s=3600.0) as peer, pytest.raises(PeerError, match="is gone"):
        peer.fetch(NAME, endless, lambda at, data: node.keeper.close())


def test_a_node_that_is_not_there_is_given_up(node, source):
    address = node.keeper.address
    node.keeper.close()
    with (
        RemoteKeeper(address, SECRET, "j1", silence_s=0.2) as peer,
        pytest.raises(PeerError) as error,
    ):
        peer.push(source, NAME)
    assert "does not respond" in str(error.value)


def test_noise_ends_no_keeper(node, source):
    context = zmq.Context()
    noise = context.socket(zmq.DEALER)
    keys(SECRET, "j1").call(noise)
    noise.connect(f"tcp://{node.keeper.address}")
    for frames in ([b"x"], [b"x", b"y"], [msgspec.msgpack.encode([1, "read"]), b""], [b"a"] * 5):
        noise.send_multipart(frames)
    with node.peer() as peer:
        peer.push(source, NAME)
    until(lambda: node.files() == {"3-40-1-0.pt": DATA}, "the file is there")
    context.destroy(linger=0)
