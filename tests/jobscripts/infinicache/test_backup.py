"""The copies that a node keeps for others: whose they are, and when they make room."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from infinicache import backup as backup_module
from infinicache import isal
from infinicache.backup import GRACE_S, Backups, BackupWriter
from infinicache.objects import Shape
from infinicache.store import ChunkStore, Refusal

from tests.waiting import PATIENCE_S

SHAPE = Shape(100, 1, 1)
BODY = b"x" * 100


def put(backups, owner, key, index=0):
    shape = msgspec.to_builtins(SHAPE)
    backups.put(owner, key, 1, shape, 0, index, isal.crc64(BODY), BODY)


def keys(backups):
    return {key for key, *_ in backups.store.chunks()}


def test_copies_of_nodes_that_left_long_ago_make_room_and_others_do_not():
    """On nodes that come and go the memory would soon be full of copies that nobody needs."""
    now = 0.0
    backups = Backups(500, lambda: now)
    backups.view(["a", "b", "c", "here"])
    for owner, count in (("a", 2), ("b", 2), ("c", 1)):
        for i in range(count):
            put(backups, owner, f"{i} of {owner}")
    backups.view(["b", "c", "here"])
    now += 1.0
    backups.view(["c", "here"])
    now = GRACE_S - 0.5
    with pytest.raises(Refusal, match="The node is full"):
        put(backups, "c", "new")
    assert len(keys(backups)) == 5, "chunks are being restored from them"
    now = GRACE_S
    put(backups, "c", "new")
    assert "new" in keys(backups)
    assert sum(key.endswith("of a") for key in keys(backups)) == 1, "one, of the first that left"
    put(backups, "c", "newer")
    with pytest.raises(Refusal, match="The node is full"):
        put(backups, "c", "newest")
    assert keys(backups) == {"0 of b", "1 of b", "0 of c", "new", "newer"}
    now += 1.0
    put(backups, "c", "newest")
    assert sum(key.endswith("of b") for key in keys(backups)) == 1
    assert backups.store.used == 500


def test_a_node_that_is_back_keeps_its_copies():
    now = 0.0
    backups = Backups(100, lambda: now)
    put(backups, "a", "k")
    backups.view(["here"])
    backups.view(["a", "here"])
    now = 2 * GRACE_S
    with pytest.raises(Refusal):
        put(backups, "b", "other")
    assert keys(backups) == {"k"}
    backups.view(["here"])
    with pytest.raises(Refusal):
        put(backups, "b", "other")


def test_a_copy_of_one_stripe_makes_room_alone():
    """Of several stripes, another owner may have copied one so far."""
    backups, shape = Backups(200), msgspec.to_builtins(Shape(200, 1, 1, stripe_bytes=100))
    for stripe in (0, 1):
        backups.put("a", "k", 1, shape, stripe, 0, isal.crc64(BODY), BODY)
    backups.put("b", "k", 1, shape, 1, 0, isal.crc64(BODY), BODY)
    backups.keep("a", [])
    assert {stripe for _, _, stripe, _ in backups.store.chunks()} == {1}


@pytest.mark.parametrize("leaves", [True, False])
def test_a_chunk_that_moved_between_two_owners_keeps_its_copy(leaves):
    """The new owner has copied it already, and never does so again."""
    now = 0.0
    backups = Backups(100, lambda: now)
    put(backups, "a", "k")
    put(backups, "b", "k")
    if leaves:
        backups.view(["b"])
        now = GRACE_S
        with pytest.raises(Refusal):
            put(backups, "b", "other")
    else:
        backups.keep("a", [])
    assert keys(backups) == {"k"}
    backups.keep("b", [])
    assert keys(backups) == set()
    assert backups.store.used == 0


class OtherNodes:
    """Nodes that keep copies, by address."""

    def __init__(self, *addresses: str) -> None:
        self.nodes = {address: Backups(1000) for address in addresses}

    def at(self, address):
        return OtherNode(self.nodes[address])


class OtherNode:
    def __init__(self, backups: Backups) -> None:
        self._backups = backups

    async def call(self, name, bodies=(), /, **arguments):
        handle = {"backup": self._backups.put, "keep": self._backups.keep}[name]
        return handle(**arguments, **({"body": bodies[0]} if bodies else {})), b""


def test_a_peer_that_no_longer_keeps_the_copies_drops_them():
    """It was to leave, and stays."""
    store, others = ChunkStore(1000), OtherNodes("first", "second")
    store.put("k", 1, SHAPE, 0, 0, isal.crc64(BODY), BODY)
    writer = BackupWriter(store, others, "own", 1e12)
    for peer in ("first", "first", "second"):
        asyncio.run(writer.run(peer))
        assert writer.peer == peer
        assert {name: keys(each) for name, each in others.nodes.items()} == {
            name: {"k"} if name == peer else set() for name in others.nodes
        }


def test_a_former_peer_that_is_stopped_stops_no_copies(monkeypatch):
    """As a process that Slurm suspends: its connections stay open."""
    monkeypatch.setattr(backup_module, "RELEASE_TIMEOUT_S", 0.01)

    class Stopped(OtherNode):
        async def call(self, name, bodies=(), /, **arguments):
            if arguments.get("chunks") == []:
                await asyncio.Event().wait()
            return await super().call(name, bodies, **arguments)

    store, others = ChunkStore(1000), OtherNodes("first", "second")
    store.put("k", 1, SHAPE, 0, 0, isal.crc64(BODY), BODY)
    others.at = lambda address: Stopped(others.nodes[address])
    writer = BackupWriter(store, others, "own", 1e12)
    assert asyncio.run(writer.run("first")) == 1
    assert asyncio.run(asyncio.wait_for(writer.run("second"), PATIENCE_S)) == 1
    assert writer.peer == "second"
