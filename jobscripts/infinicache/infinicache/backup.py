"""Copies of a node's chunks at a peer, brought up to date now and then: the delta synchronisation
of InfiniCache, as an option.

What was written since the last time is lost with the node all the same. What was copied is fetched
from the peer instead of being made out of d other chunks, and saves objects that lost more than p
nodes. It costs the pool as much memory again. A copy is not counted as protection.
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
    """What a node keeps for others, at most ``capacity`` bytes."""

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
        """Take a copy."""
        self.store.put(key, version, msgspec.convert(shape, Shape), stripe, index, crc, body)
        self._owned.setdefault(owner, set()).add((key, version, stripe, index))
        return {}

    def keep(self, owner: str, chunks: list[list[Any]]) -> dict[str, Any]:
        """The owner holds these and no others any more."""
        owned = {
            (str(key), int(version), int(stripe), int(index))
            for key, version, stripe, index in chunks
        }
        for key, version, _, index in self._owned.get(owner, set()) - owned:
            self.store.forget(key, version, index)
        self._owned[owner] = self._owned.get(owner, set()) & owned
        return {}


class BackupTo:
    """A node's copies at its peer. ``peer``: who has them, None before the first time."""

    def __init__(self, store: ChunkStore, peers: Peers, address: str, bytes_s: float) -> None:
        self.peer: str | None = None
        self._store, self._peers, self._address, self._bytes_s = store, peers, address, bytes_s
        self._done: set[Chunk] = set()

    async def run(self, peer: str) -> int:
        """Copy what is new to ``peer``, slowly, and have it forget what is not here any more.
        Return the chunks that were copied.
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
                except (Refusal, CallFailed):  # dropped meanwhile, or the peer is full
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
