"""A cache node: chunks in memory, served to clients; it fetches, rebuilds and hands over chunks as
its proxy says.

Decides nothing about placement. It registers with the proxies of the view it is told
(:meth:`CacheNode.view`), again whenever a proxy does not know it, and answers for both roles on one
port.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from infinicache import isal
from infinicache.backup import Backups, BackupTo
from infinicache.codec import chunk_bytes, rebuild
from infinicache.connection import PROTOCOL, CallFailed, ConnectionLost, Peers
from infinicache.demand import DemandCurve
from infinicache.isal import Buffer
from infinicache.objects import CacheError, Shape, TooLarge, Unavailable
from infinicache.proxy import Proxy
from infinicache.store import ChunkStore, Refusal
from infinicache.stripes import is_chunk
from malletrain.streams.server import StreamServer

BEAT_S = 0.5
log = logging.getLogger("infinicache")

_CODES: tuple[tuple[type[Exception], str], ...] = (
    (TooLarge, "too large"),
    (Unavailable, "unavailable"),
    (CacheError, "refused"),
)


class Server(StreamServer):
    """Serves ``handlers`` (name → function) on ``host``:``port`` (0: any) in the running loop. A
    handler's Refusal, CacheError or ConnectionLost is told to the caller as a sentence.
    """

    def __init__(
        self,
        handlers: dict[str, Callable[..., Any]],
        key: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        super().__init__(handlers, key, PROTOCOL, host, port)

    def error_code(self, error: BaseException) -> str:
        """Return the code that names ``error`` to the caller; empty if it is unexpected."""
        if isinstance(error, Refusal):
            return error.code
        code = next((code for kind, code in _CODES if isinstance(error, kind)), "")
        return code or super().error_code(error)


class CacheNode:
    """One process of the cache. ``proxies``: how many of the members, counted from the first, are
    proxies. ``backup_s``: how often what is new here is copied to a peer, 0 for never; half of the
    ``capacity`` is for the copies of others then. ``reserve``: the share of the memory that puts
    leave free. ``name``: of the node, for telling its rack.
    """

    def __init__(
        self,
        capacity: int,
        key: bytes = b"",
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        proxies: int = 1,
        move_bytes_s: float = 200e6,
        backup_s: float = 0.0,
        reserve: float = 0.0,
        name: str = "",
    ) -> None:
        copies = capacity // 2 if backup_s > 0 else 0
        self.store = ChunkStore(capacity - copies)
        self.backups = Backups(copies)
        self.for_objects = (capacity - copies) * (1.0 - reserve)
        """Bytes that puts may use here."""
        self.name = name
        self._began = time.monotonic()
        self._peer: str | None = None
        self._peers = Peers(key)
        self._slots = max(1, proxies)
        self.proxy = Proxy(self._peers, move_bytes_s=move_bytes_s, reserve=reserve)
        self.server = Server(
            {
                "put": self._put,
                "get": self._get,
                "backup": self.backups.put,
                "keep": self.backups.keep,
                "drop": self._drop,
                "forget": self._forget,
                "pull": self._pull,
                "topology": self._topology,
                "health": self._health,
                **self.proxy.handlers(),
            },
            key,
            host,
            port,
        )
        self.address = self.server.address
        self.number = 0
        self._members: tuple[str, ...] = ()
        self._leaving: frozenset[str] = frozenset()
        self.slot: int | None = None
        self._registered_at: set[str] = set()
        self._backup = BackupTo(self.store, self._peers, self.address, move_bytes_s)
        self._closed = False
        self._tasks = [asyncio.get_running_loop().create_task(self._keep_registered())]
        if backup_s > 0:
            self._tasks.append(
                asyncio.get_running_loop().create_task(self._keep_backed_up(backup_s))
            )

    # --- the membership ---

    def view(
        self,
        members: Sequence[str],
        leaving: Sequence[str] = (),
        number: int | None = None,
        lasts: Mapping[str, float] | None = None,
    ) -> None:
        """Who is in the cache now: addresses in rank order, the same at every member; ``leaving``:
        those that are about to go; ``lasts``: seconds that nodes are expected to last yet.
        """
        self._members, self._leaving = tuple(members), frozenset(leaving)
        self.number = self.number + 1 if number is None else number
        if self.slot is None and self.address in self._members:
            self.slot = self._members.index(self.address) % self._slots
        self._registered_at.intersection_update(self.proxies())
        self.proxy.view(
            self._members,
            self._leaving,
            [s for s, a in enumerate(self.proxies()) if a == self.address],
            lasts or {},
        )
        self._peers.forget(set(self._members))

    def proxies(self) -> list[str]:
        """The address of the proxy of each slot: members that stay come first."""
        staying = [a for a in self._members if a not in self._leaving] or list(self._members)
        return [staying[slot % len(staying)] for slot in range(self._slots)] if staying else []

    async def _keep_registered(self) -> None:
        while not self._closed:
            for address in dict.fromkeys(self.proxies()):
                try:
                    await self._register(address)
                except (ConnectionLost, CallFailed) as error:
                    log.info("not registered with the proxy at %s: %s", address, error)
                    self._registered_at.discard(address)
            await asyncio.sleep(BEAT_S if self._registered_at else BEAT_S / 10)

    async def _register(self, address: str) -> None:
        peer = self._peers.at(address)
        if address in self._registered_at:
            answer, _ = await peer.call(
                "beat", address=self.address, number=self.number, backup=self._backup.peer
            )
            if answer["registered"]:
                self._peer = answer["peer"] or self._peer
                return
        objects = [msgspec.to_builtins(h) for h in self.store.inventory()]
        answer, _ = await peer.call(
            "register",
            address=self.address,
            capacity=self.store.capacity,
            slot=self.slot,
            objects=objects,
            leaving=self.address in self._leaving,
            name=self.name,
            age_s=time.monotonic() - self._began,
        )
        for key, version in answer["drop"]:
            self.store.drop(key, version)
        self._registered_at.add(address)

    async def _keep_backed_up(self, every_s: float) -> None:
        while not self._closed:
            await asyncio.sleep(every_s)
            staying = [a for a in self._members if a not in self._leaving]
            if self.address in staying and self._peer in staying:
                await self._backup.run(self._peer)

    async def demand(self, observed_s: float = 0.0) -> dict[int, DemandCurve]:
        """What is asked of each proxy's keys; empty while one of them has not been looking for so
        long. Raises ConnectionLost, CallFailed.
        """
        curves = {}
        for slot, address in enumerate(self.proxies()):
            answer, _ = await self._peers.at(address).call("demand")
            if answer["observed_s"] < observed_s:
                return {}
            curves[slot] = msgspec.convert(answer["curve"], DemandCurve)
        return curves

    async def drain(self) -> int:
        """Hand over what this node holds to the others, as far as the time allows. Return the
        bytes handed over.
        """
        moved = 0
        for slot, address in enumerate(self.proxies()):
            if slot == self.slot and address != self.address:
                await self._register(address)  # it may be the proxy since a moment ago
                answer, _ = await self._peers.at(address).call("drain", address=self.address)
                moved += answer["bytes"]
        return moved

    async def close(self) -> None:
        """Stop serving."""
        # Until Python 3.12 a task that is cancelled just as its connection is closed hears of the
        # connection alone, and would go on for ever.
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self.proxy.close()
        self.server.close()
        self._peers.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- chunks ---

    def _put(
        self,
        key: str,
        version: int,
        shape: dict[str, Any],
        stripe: int,
        index: int,
        crc: int,
        body: Buffer = b"",
    ) -> dict[str, Any]:
        self.store.put(key, version, msgspec.convert(shape, Shape), stripe, index, crc, body)
        return {}

    def _get(
        self, key: str, version: int, stripe: int, index: int
    ) -> tuple[dict[str, Any], list[Buffer]]:
        try:
            data, crc = self.store.get(key, version, stripe, index)
        except Refusal:
            data, crc = self.backups.store.get(key, version, stripe, index)
        # A caller compares what it is with what it asked for: a check sum fits any key.
        return {"crc": crc, "of": [key, version, stripe, index]}, [data]

    def _drop(self, items: list[list[Any]]) -> dict[str, Any]:
        for key, version in items:
            self.store.drop(key, version)
        return {}

    def _forget(self, key: str, version: int, index: int) -> dict[str, Any]:
        self.store.forget(key, version, index)
        return {}

    def _topology(self) -> dict[str, Any]:
        return {"proxies": self.proxies(), "number": self.number, "members": list(self._members)}

    def _health(self) -> dict[str, Any]:
        return {
            "used": self.store.used,
            "capacity": self.store.capacity,
            "slot": self.slot,
            "address": self.address,
        }

    async def _pull(
        self,
        key: str,
        version: int,
        shape: dict[str, Any],
        index: int,
        sources: dict[int, str],
        spare: str | None = None,
    ) -> dict[str, Any]:
        """Get chunk ``index`` of every stripe of an object: as it is where a source or ``spare``
        has it, else made out of d others.
        """
        form, moved = msgspec.convert(shape, Shape), 0
        for stripe, length in enumerate(form.stripes):
            size = chunk_bytes(length, form.d)
            chunks: dict[int, Buffer] = {}
            todo = sorted(sources.items(), key=lambda source: source[0] != index)
            for source, address in [*([(index, spare)] if spare else []), *todo]:
                try:
                    head, body = await self._peers.at(address).call(
                        "get", key=key, version=version, stripe=stripe, index=source
                    )
                except (ConnectionLost, CallFailed):
                    continue
                if is_chunk(head, body, (key, version, stripe, source), size):
                    chunks[source] = body
                    moved += size
                if index in chunks or len(chunks) == form.d:
                    break
            if index not in chunks:
                if len(chunks) < form.d:
                    raise CacheError(
                        f"Chunk {index} of {key!r} cannot be made: only {len(chunks)} of "
                        f"{form.d} sources answer."
                    )
                made = bytearray(size)
                rebuild(chunks, [index], [made], form.code)
                chunks[index] = made
            self.store.put(
                key, version, form, stripe, index, isal.crc64(chunks[index]), chunks[index]
            )
        return {"bytes": moved}


__all__ = ["CacheNode", "Refusal"]
