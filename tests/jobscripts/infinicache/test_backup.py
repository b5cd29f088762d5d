"""The copies that a node keeps for others: whose they are, and when they make room."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from infinicache import isal
from infinicache.backup import Backups, BackupWriter
from infinicache.objects import Shape
from infinicache.store import ChunkStore, Refusal

SHAPE = Shape(100, 1, 1)
BODY = b"x" * 100


def put(backups, owner, key, index=0):
    shape = msgspec.to_builtins(SHAPE)
    backups.put(owner, key, 1, shape, 0, index, isal.crc64(BODY), BODY)


def keys(backups):
    return {key for key, *_ in backups.store.chunks()}


def test_copies_of_nodes_that_have_left_make_room_and_others_do_not():
    """On nodes that come and go the memory would soon be full of copies that nobody needs."""
    backups = Backups(300)
    backups.view(["a", "b", "c", "here"])
    for owner in "abc":
        put(backups, owner, f"of {owner}")
    backups.view(["b", "c", "here"])
    backups.view(["c", "here"])
    assert keys(backups) == {"of a", "of b", "of c"}, "chunks may be restored from them"
    put(backups, "c", "new")
    assert keys(backups) == {"of b", "of c", "new"}, "the first that left"
    put(backups, "c", "newer")
    assert keys(backups) == {"of c", "new", "newer"}
    with pytest.raises(Refusal, match="The node is full"):
        put(backups, "c", "newest")
    assert backups.store.used == 300


def test_a_node_that_is_back_keeps_its_copies():
    backups = Backups(100)
    put(backups, "a", "k")
    backups.view(["here"])
    backups.view(["a", "here"])
    with pytest.raises(Refusal):
        put(backups, "b", "other")
    assert keys(backups) == {"k"}


@pytest.mark.parametrize("leaves", [True, False])
def test_a_chunk_that_moved_between_two_owners_keeps_its_copy(leaves):
    """The new owner has copied it already, and never does so again."""
    backups = Backups(100)
    put(backups, "a", "k")
    put(backups, "b", "k")
    if leaves:
        backups.view(["b"])
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
