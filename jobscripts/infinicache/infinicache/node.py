"""A node of the cache: stores chunks in memory and serves them to clients; fetches, rebuilds and
hands over chunks at the request of its proxy. Decides nothing about placement.

The node registers with the proxies of its current view (:meth:`CacheNode.view`), and registers
again whenever a proxy does not know it. It serves as node and as proxy on one port.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from infinicache import isal
from infinicache.backup import Backups, BackupWriter
from infinicache.codec import chunk_bytes, rebuild
from infinicache.connection import PROTOCOL, CallFailed, ConnectionLost, Peers
from infinicache.demand import DemandCurve
from infinicache.isal import Buffer
from infinicache.objects import (
    MAX_KEY_BYTES,
    CacheError,
    Shape,
    StoredObject,
    TooLarge,
    Unavailable,
)
from infinicache.proxy import Handler, Proxy
from infinicache.store import ChunkStore, Refusal
from infinicache.stripes import is_chunk
from malletrain.streams.connection import MAX_HEAD
from malletrain.streams.server import StreamServer
from malletrain.waits import time_limit

HEARTBEAT_S = 0.5
MAX_INVENTORY_BYTES = MAX_HEAD - (1 << 20)
"""Maximum size of what a node tells a proxy of its objects, bytes: 560,000 with keys of
20 characters.
"""
MAX_OBJECT_BYTES = MAX_KEY_BYTES + 768
"""Maximum size of one of them, bytes."""
TOPOLOGY_S = 2.0
"""Maximum time in which another member says which view it knows, seconds."""
PROXY_REQUESTS = ("find", "begin", "commit", "delete")
"""Requests of clients to a proxy, whose answers have the number of the view."""
SOURCE_TIMEOUT_S = 30.0
"""Maximum time in which a node sends a chunk to another, seconds."""
log = logging.getLogger("infinicache")

_CODES: tuple[tuple[type[Exception], str], ...] = (
    (TooLarge, "too large"),
    (Unavailable, "unavailable"),
    (CacheError, "refused"),
)


class Server(StreamServer):
    """Serves requests on a port in the running loop. The caller gets a handler's Refusal,
    CacheError or ConnectionLost as a sentence.

    Args:
        handlers: name of a request → its function.
        key: the cache's key.
        host: address to listen at.
        port: port to listen at; 0: any.
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
        """Return the code of ``error`` for the caller; empty if the error is unexpected."""
        if isinstance(error, Refusal):
            return error.code
        code = next((code for kind, code in _CODES if isinstance(error, kind)), "")
        return code or super().error_code(error)


def latest(
    objects: list[StoredObject], max_bytes: int | None = None
) -> tuple[list[StoredObject], list[StoredObject]]:
    """Return the objects of which one message can tell a proxy, and the rest: those whose last
    read is the longest ago. The order stays.

    Args:
        objects: all objects of a node.
        max_bytes: maximum size of the list; None: what a message can have.
    """
    limit = MAX_INVENTORY_BYTES if max_bytes is None else max_bytes
    if len(objects) * MAX_OBJECT_BYTES <= limit:
        return objects, []
    encoder = msgspec.msgpack.Encoder()
    by_use = sorted(range(len(objects)), key=lambda i: -objects[i].used)
    sizes = accumulate(len(encoder.encode(objects[i])) for i in by_use)
    selection = {i for i, size in zip(by_use, sizes, strict=True) if size <= limit}
    return (
        [o for i, o in enumerate(objects) if i in selection],
        [o for i, o in enumerate(objects) if i not in selection],
    )


class CacheNode:
    """One process of the cache.

    Args:
        capacity: memory for chunks, bytes.
        key: the cache's key.
        host, port: see :class:`Server`.
        proxies: number of members, counted from the first, that are proxies.
        move_bytes_s: rate of repair and rebalancing, bytes per second.
        backup_s: interval at which new chunks are copied to a peer, seconds; 0: never. With
            backups, half of the capacity is for the copies of other nodes.
        reserve: share of the memory that puts leave free.
        name: name of the node, from which its rack is derived.
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
        """Memory that puts may use, bytes."""
        self.name = name
        self._began = time.monotonic()
        self._peer: str | None = None
        self._peers = Peers(key)
        self._slots = max(1, proxies)
        self.proxy = Proxy(
            self._peers, move_bytes_s=move_bytes_s, reserve=reserve, slots=self._slots
        )
        handlers = self.proxy.handlers()
        self.server = Server(
            {
                "put": self._put,
                "get": self._get,
                "backup": self.backups.put,
                "keep": self.backups.keep,
                "drop": self._drop,
                "forget": self._forget,
                "check": self._check,
                "pull": self._pull,
                "topology": self._topology,
                "health": self._health,
                **handlers,
                **{name: self._with_number(handlers[name]) for name in PROXY_REQUESTS},
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
        self._backup = BackupWriter(self.store, self._peers, self.address, move_bytes_s)
        self._closed = False
        self._tasks = [
            asyncio.get_running_loop().create_task(self._keep_registered()),
            asyncio.get_running_loop().create_task(self._keep_informed()),
        ]
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
        """Set the current members.

        Args:
            members: addresses in rank order, the same order at every member.
            leaving: addresses of the members that are about to leave.
            number: number of this view; None: one more than the last. A view that is older than
                the present one is ignored.
            lasts: address → time that its node is expected to stay, seconds; None: as before.
        """
        if number is not None and number < self.number:
            return
        self._members, self._leaving = tuple(members), frozenset(leaving)
        self.number = self.number + 1 if number is None else number
        if self.slot is None and self.address in self._members:
            self.slot = self._members.index(self.address) % self._slots
        self._registered_at.intersection_update(self.proxies())
        self.backups.view(self._members)
        self.proxy.view(
            self._members,
            self._leaving,
            [s for s, a in enumerate(self.proxies()) if a == self.address],
            lasts,
        )
        self._peers.forget(set(self._members))

    def proxies(self) -> list[str]:
        """Return the address of the proxy of each slot. Leaving members are proxies only if no
        other member is there.
        """
        staying = [a for a in self._members if a not in self._leaving] or list(self._members)
        return [staying[slot % len(staying)] for slot in range(self._slots)] if staying else []

    async def _keep_registered(self) -> None:
        """Register with the proxies, with each on its own: one that is stopped accepts a request
        and does not answer, and the others would take this node for silent.
        """
        requests: dict[str, asyncio.Task[None]] = {}
        try:
            while not self._closed:
                requests = {a: task for a, task in requests.items() if not task.done()}
                begun = {
                    address: asyncio.ensure_future(self._try_to_register(address))
                    for address in dict.fromkeys(self.proxies())
                    if address not in requests
                }
                requests.update(begun)
                if begun:
                    await asyncio.wait(begun.values(), timeout=HEARTBEAT_S)
                await asyncio.sleep(HEARTBEAT_S if self._registered_at else HEARTBEAT_S / 10)
        finally:
            for task in requests.values():
                task.cancel()
            await asyncio.gather(*requests.values(), return_exceptions=True)

    async def _try_to_register(self, address: str) -> None:
        try:
            await self._register(address)
        except (ConnectionLost, CallFailed) as error:
            log.info("not registered with the proxy at %s: %s", address, error)
            self._registered_at.discard(address)

    async def _keep_informed(self) -> None:
        """While this process is a proxy, ask the other members in turn for the view that they know,
        and adopt it if it is newer: a process that is cut off from MalleTrain does not learn
        otherwise that another one has its slots.
        """
        turn = 0
        while not self._closed:
            await asyncio.sleep(HEARTBEAT_S)
            others = [a for a in self._members if a != self.address]
            is_member = self.address in self._members
            if not others or (is_member and self.address not in self.proxies()):
                continue
            turn += 1
            try:
                async with time_limit(TOPOLOGY_S):
                    head, _ = await self._peers.at(others[turn % len(others)]).call("topology")
            except (ConnectionLost, CallFailed, asyncio.TimeoutError):
                continue
            if head["number"] > self.number and "leaving" in head:
                self.view(head["members"], head["leaving"], head["number"])

    async def _register(self, address: str) -> bool:
        """Let a proxy know this node. Return whether it serves this node's slot."""
        peer = self._peers.at(address)
        if address in self._registered_at:
            answer, _ = await peer.call(
                "beat", address=self.address, number=self.number, backup=self._backup.peer
            )
            if answer["registered"]:
                self._peer = answer["peer"] or self._peer
                return bool(answer.get("served", True))
        objects, rest = latest(self.store.inventory())
        answer, _ = await peer.call(
            "register",
            address=self.address,
            capacity=self.store.capacity,
            slot=self.slot,
            objects=msgspec.to_builtins(objects),
            leaving=self.address in self._leaving,
            name=self.name,
            age_s=time.monotonic() - self._began,
        )
        for key, version in answer["drop"]:
            self.store.drop(key, version)
        for stored in rest:  # the proxy does not know them, and nobody would ever drop them
            for index in range(stored.shape.code.n):
                self.store.forget(stored.key, stored.version, index)
        self._registered_at.add(address)
        return bool(answer.get("served", True))  # a proxy of an older version does not say it

    async def _keep_backed_up(self, every_s: float) -> None:
        while not self._closed:
            await asyncio.sleep(every_s)
            staying = [a for a in self._members if a not in self._leaving]
            if self.address in staying and self._peer in staying:
                await self._backup.run(self._peer)

    async def demand(self, observed_s: float = 0.0) -> dict[int, DemandCurve]:
        """Return the demand curve of each proxy's slot; empty if a proxy has observed for less than
        ``observed_s`` seconds. Raises ConnectionLost, CallFailed.
        """
        curves = {}
        for slot, address in enumerate(self.proxies()):
            answer, _ = await self._peers.at(address).call("demand")
            if answer["observed_s"] < observed_s:
                return {}
            curves[slot] = msgspec.convert(answer["curve"], DemandCurve)
        return curves

    async def drain(self) -> int:
        """Hand over the chunks of this node to the others. Return the number of bytes handed over.
        The caller limits the time: it waits until the next proxy knows that it is the proxy.
        """
        while True:
            proxies = self.proxies()
            if self.slot is None or not proxies or proxies[self.slot] == self.address:
                return 0
            address = proxies[self.slot]
            try:
                if await self._register(address):
                    break
            except CallFailed as error:
                log.info("the proxy at %s is not ready: %s", address, error)
            # That member has just become the proxy, and does not know it yet.
            await asyncio.sleep(HEARTBEAT_S / 10)
        answer, _ = await self._peers.at(address).call("drain", address=self.address)
        return int(answer["bytes"])

    async def close(self) -> None:
        """Stop serving."""
        # Before Python 3.12 a task that is cancelled at the moment its connection is closed sees
        # only the closed connection, and would continue for ever.
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
        return {"number": self.number}

    def _get(
        self, key: str, version: int, stripe: int, index: int
    ) -> tuple[dict[str, Any], list[Buffer]]:
        try:
            data, crc = self.store.get(key, version, stripe, index)
        except Refusal:
            data, crc = self.backups.store.get(key, version, stripe, index)
        # The caller compares this identity with its request: a checksum alone fits any key.
        return {"crc": crc, "of": [key, version, stripe, index]}, [data]

    def _drop(self, items: list[list[Any]]) -> dict[str, Any]:
        for key, version in items:
            self.store.drop(key, version)
        return {}

    def _forget(self, key: str, version: int, index: int) -> dict[str, Any]:
        self.store.forget(key, version, index)
        return {}

    def _check(self, key: str, version: int, indices: list[int]) -> dict[str, Any]:
        """Return which chunks of an object are here, undamaged."""
        return {"intact": [i for i in indices if self.store.has_intact(key, version, i)]}

    def _topology(self) -> dict[str, Any]:
        return {
            "proxies": self.proxies(),
            "number": self.number,
            "members": list(self._members),
            "leaving": list(self._leaving),
        }

    def _with_number(self, handle: Handler) -> Handler:
        """Return a handler whose answers have the number of the view of this process, too."""

        async def answer(*values: Any, **arguments: Any) -> dict[str, Any]:
            return {**await handle(*values, **arguments), "number": self.number}

        return answer

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
        """Get chunk ``index`` of every stripe of an object: a copy from a source or from ``spare``,
        else rebuilt from d other chunks. Return the number of transferred bytes.
        """
        form, moved = msgspec.convert(shape, Shape), 0
        silent: set[str] = set()
        for stripe, length in enumerate(form.stripes):
            size = chunk_bytes(length, form.d)
            chunks: dict[int, Buffer] = {}
            todo = sorted(sources.items(), key=lambda source: source[0] != index)
            for source, address in [*([(index, spare)] if spare else []), *todo]:
                if address in silent:
                    continue
                try:
                    async with time_limit(SOURCE_TIMEOUT_S):
                        head, body = await self._peers.at(address).call(
                            "get", key=key, version=version, stripe=stripe, index=source
                        )
                except asyncio.TimeoutError:  # such as a process that is stopped
                    silent.add(address)
                    continue
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
                rebuilt = bytearray(size)
                rebuild(chunks, [index], [rebuilt], form.code)
                chunks[index] = rebuilt
            self.store.put(
                key, version, form, stripe, index, isal.crc64(chunks[index]), chunks[index]
            )
        return {"bytes": moved}


__all__ = ["CacheNode", "Refusal"]
