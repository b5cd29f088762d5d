"""Copies a node's chunks to a peer at intervals: the delta synchronisation of InfiniCache, as an
option.

Chunks that were written after the last copy are lost with the node. A copied chunk is fetched from
the peer instead of being rebuilt from d other chunks, so that an object survives the loss of more
than p nodes. The copies need as much memory as the chunks. They do not count as protection.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from infinicache.connection import CallFailed, ConnectionLost, Peers
from infinicache.isal import Buffer
from infinicache.objects import Shape
from infinicache.store import ChunkStore, Refusal

Chunk = tuple[str, int, int, int]
"""(key, version, stripe, index)."""


class Backups:
    """The copies that a node keeps for other nodes, at most ``capacity`` bytes."""

    def __init__(self, capacity: int) -> None:
        self.store = ChunkStore(capacity)
        self._owned: dict[str, set[Chunk]] = {}

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
        """Store a copy of a chunk for its owner."""
        self.store.put(key, version, msgspec.convert(shape, Shape), stripe, index, crc, body)
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
        for key, version, _, index in self._owned.get(owner, set()) - owned:
            self.store.forget(key, version, index)
        self._owned[owner] = self._owned.get(owner, set()) & owned
        return {}


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
        if peer != self.peer:
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
        return copied
