"""Copies a node's chunks to a peer at intervals: the delta synchronisation of InfiniCache, as an
option.

Chunks that were written after the last copy are lost with the node. A copied chunk is fetched from
the peer instead of being rebuilt from d other chunks, so that an object survives the loss of more
than p nodes. The copies need as much memory as the chunks. They do not count as protection.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from infinicache.connection import CallFailed, ConnectionLost, Peers
from infinicache.entries import PoolNode
from infinicache.isal import Buffer
from infinicache.objects import Shape
from infinicache.store import ChunkStore, Refusal
from malletrain.waits import time_limit

GRACE_S = 600.0
"""Time for which the copies of a node that has left stay in any case, seconds: its chunks are
restored from them, at a limited rate.
"""
RELEASE_TIMEOUT_S = 10.0
"""Maximum time in which a former peer answers that it drops the copies, seconds."""
Chunk = tuple[str, int, int, int]
"""(key, version, stripe, index)."""


def peer_of(
    nodes: Mapping[str, PoolNode],
    address: str,
    peer: str | None,
    peers: Mapping[str, str | None] = MappingProxyType({}),
) -> str | None:
    """Return the node that is to keep copies of a node's chunks: ``peer`` as long as it can. Else,
    of the nodes that are not expected to leave with it (of all, if there are none), the one that
    keeps the copies of the fewest others; of several, the next one after the node. None if the node
    is not known.

    Args:
        nodes: address → node of the pool.
        address: the node whose chunks are copied.
        peer: who keeps its copies so far.
        peers: node → who keeps its copies, of all nodes.
    """
    if address not in nodes:
        return None
    if peer in nodes and not nodes[str(peer)].leaving:
        return peer
    at = [*nodes].index(address) + 1
    others = [a for a in (*[*nodes][at:], *nodes) if a != address and not nodes[a].leaving]
    departure_groups = set(nodes[address].prospect.departure_groups)
    in_other_groups = [
        a for a in others if not departure_groups & set(nodes[a].prospect.departure_groups)
    ]
    uses = Counter(peers.values())
    return min(in_other_groups or others, key=lambda other: uses[other], default=None)


class Backups:
    """The copies that a node keeps for other nodes.

    Args:
        capacity: memory for them, bytes.
        clock: returns the time, seconds.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = ChunkStore(capacity)
        self._clock = clock
        self._owned: dict[str, set[Chunk]] = {}
        self._departed: dict[str, float] = {}
        """Owners that have left, the first one first → when that was."""

    def view(self, members: Sequence[str]) -> None:
        """Set the current members. Chunks of an owner that has left may still be restored from
        their copies, which therefore stay for :data:`GRACE_S`, and then until others need the
        memory.
        """
        now = self._clock()
        self._departed = {o: at for o, at in self._departed.items() if o not in members}
        for owner in self._owned:
            if owner not in members:
                self._departed.setdefault(owner, now)

    def put(
        self,
        owner: str,
        key: str,
        version: int,
        shape: dict[str, Any],
        stripe: int,
        index: int,
        crc: int,
        body: Buffer = b"",
    ) -> dict[str, Any]:
        """Store a copy of a chunk for its owner. Raises Refusal as :meth:`ChunkStore.put`."""
        form = msgspec.convert(shape, Shape)
        while True:
            try:
                self.store.put(key, version, form, stripe, index, crc, body)
                break
            except Refusal as refusal:
                if refusal.code != "full" or not self._make_room():
                    raise
        self._owned.setdefault(owner, set()).add((key, version, stripe, index))
        return {}

    def keep(self, owner: str, chunks: list[list[Any]]) -> dict[str, Any]:
        """Drop the copies of ``owner`` that are not in ``chunks``, which lists all chunks that it
        still has.
        """
        owned = {
            (str(key), int(version), int(stripe), int(index))
            for key, version, stripe, index in chunks
        }
        before = self._owned.get(owner, set())
        self._owned[owner] = before & owned
        for chunk in before - owned:
            self._forget(chunk)
        return {}

    def _make_room(self) -> bool:
        """Drop a copy of the node that left first, if that was long ago. Return whether there was
        one.
        """
        for owner, left_at in [*self._departed.items()]:
            if self._clock() - left_at < GRACE_S:
                break
            if chunks := self._owned.get(owner):
                self._forget(chunks.pop())
                return True
            self._owned.pop(owner, None)
            del self._departed[owner]
        return False

    def _forget(self, chunk: Chunk) -> None:
        """Drop a copy, unless another owner has it: a chunk may have moved from one to the
        other.
        """
        if not any(chunk in chunks for chunks in self._owned.values()):
            key, version, stripe, index = chunk
            self.store.forget(key, version, index, stripe)


class BackupWriter:
    """The copies of one node's chunks at its peer. ``peer``: address of the node that has them;
    None before the first copy.
    """

    def __init__(self, store: ChunkStore, peers: Peers, address: str, bytes_s: float) -> None:
        self.peer: str | None = None
        self._store, self._peers, self._address, self._bytes_s = store, peers, address, bytes_s
        self._done: set[Chunk] = set()

    async def run(self, peer: str) -> int:
        """Copy new chunks to ``peer`` at a limited rate, and let it drop the copies of chunks that
        this node no longer has. Return the number of copied chunks.
        """
        previous = self.peer
        if peer != previous:
            self._done.clear()
        there, copied = self._store.chunks(), 0
        call = self._peers.at(peer).call
        try:
            for chunk, shape in there.items():
                if chunk in self._done:
                    continue
                key, version, stripe, index = chunk
                try:
                    data, crc = self._store.get(key, version, stripe, index, touch=False)
                    about = {
                        "key": key,
                        "version": version,
                        "shape": msgspec.to_builtins(shape),
                        "stripe": stripe,
                        "index": index,
                        "crc": crc,
                    }
                    await call("backup", [data], owner=self._address, **about)
                # the chunk was dropped meanwhile, or the peer is full
                except (Refusal, CallFailed):
                    continue
                self._done.add(chunk)
                copied += 1
                await asyncio.sleep(len(data) / self._bytes_s)
            self._done &= there.keys()
            await call("keep", owner=self._address, chunks=[list(chunk) for chunk in self._done])
            self.peer = peer
        except ConnectionLost:
            self.peer = None
        if previous is not None and self.peer == peer != previous:
            # It may have left, or be a process that is stopped.
            with contextlib.suppress(ConnectionLost, CallFailed, asyncio.TimeoutError):
                async with time_limit(RELEASE_TIMEOUT_S):
                    await self._peers.at(previous).call("keep", owner=self._address, chunks=[])
        return copied
