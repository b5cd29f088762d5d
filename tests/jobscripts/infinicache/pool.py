"""A cache in this process: real sockets, one event loop, nodes that come and go as a test says."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from infinicache import AsyncCache, CacheNode, mover, proxies, proxy
from infinicache import node as cache_node

from malletrain.streams import connection, server
from tests.waiting import PATIENCE_S

# All nodes are one process: where it stands still none of them is lost.
connection.CONNECT_S = server.HANDSHAKE_S = mover.ANSWER_TIMEOUT_S = proxy.REGISTRATION_WAIT_S = (
    PATIENCE_S
)
cache_node.TOPOLOGY_S = proxies.TOPOLOGY_S = PATIENCE_S
KEY = b"a secret of the tests"
MIB = 1 << 20


class Pool:
    """``nodes`` in rank order; the first are the proxies."""

    def __init__(
        self, count: int = 0, capacity: int = 64 * MIB, proxies: int = 1, backup_s: float = 0.0
    ) -> None:
        self.capacity, self.proxies, self.backup_s = capacity, proxies, backup_s
        self.nodes: list[CacheNode] = []
        self.number = 0
        for _ in range(count):
            self._new()
        self.announce()

    def _new(self) -> CacheNode:
        node = CacheNode(
            self.capacity, KEY, proxies=self.proxies, move_bytes_s=1e12, backup_s=self.backup_s
        )
        self.nodes.append(node)
        return node

    def announce(self, leaving: tuple[CacheNode, ...] = ()) -> None:
        """Send every node the list of members."""
        self.number += 1
        for node in self.nodes:
            node.view([n.address for n in self.nodes], [n.address for n in leaving], self.number)

    def join(self) -> CacheNode:
        node = self._new()
        self.announce()
        return node

    async def lose(self, node: CacheNode, announce: bool = True) -> None:
        """The node dies; ``announce``: the others learn of it at once."""
        self.nodes.remove(node)
        await node.close()
        if announce:
            self.announce()

    def cut_off(self, node: CacheNode) -> None:
        """MalleTrain loses the node: the others learn of it, and the node itself does not."""
        self.nodes.remove(node)
        self.announce()

    async def leave(self, node: CacheNode) -> None:
        """The node leaves with notice: it drains first."""
        self.announce((node,))
        await node.drain()
        await self.lose(node)

    def cache(self, **options: Any) -> AsyncCache:
        return AsyncCache([n.address for n in self.nodes], KEY, **options)

    async def close(self) -> None:
        for node in self.nodes:
            await node.close()


async def until(condition: Callable[[], Awaitable[Any]], what: str) -> Any:
    """Wait until ``condition`` holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := await condition()):
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
        await asyncio.sleep(0.01)
    return value


async def heard(cache: AsyncCache, pool: Pool) -> None:
    """Wait until the proxy has heard of all nodes. It would wait for one that is lost before."""

    async def done() -> bool:
        addresses = {address for p in await cache.summary() for address in p["nodes"]}
        return {n.address for n in pool.nodes} <= addresses

    await until(done, "the proxy has heard of all nodes")


async def whole(cache: AsyncCache, nodes: int) -> None:
    """Wait until all nodes are known and every object has the protection it was stored with, or
    the most that this number of nodes allows.
    """

    async def done() -> bool:
        pools = await cache.summary()
        return sum(len(p["nodes"]) for p in pools) == nodes and all(
            p["degraded"] == 0 and not p["waiting_repairs"] for p in pools
        )

    await until(done, "everything is repaired")


def run(work):
    """Run a coroutine function with a pool that is closed at the end."""

    async def inside():
        pools = []

        def make(*args, **options):
            pools.append(Pool(*args, **options))
            return pools[-1]

        try:
            await work(make)
        finally:
            for pool in pools:
                await pool.close()

    asyncio.run(inside())


def data(size, seed=0):
    return random.Random(seed).randbytes(size)
