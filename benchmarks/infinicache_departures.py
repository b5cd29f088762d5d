"""Hit rates of the cache after departures without notice: a real pool beside the model of
:mod:`benchmarks.infinicache_replay`, with the same requests and the same departures.

    python -m benchmarks.infinicache_departures [--days 1] [--hours 2] [--nodes 16] [--scale 1000]
        [--idle FILE] [--wait] [--json]

The nodes, proxies and client of the real pool are in this process, over real sockets. Its memory
and its objects are ``--scale`` times smaller; each object has the code of its full size. Requests
and departures follow each other in the order of the trace, without pauses. ``--wait``: after each
departure the next request waits for the repairs, so that none is late. Every value that is read is
compared with the stored one.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import heapq
import json
import logging
import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Shown

from benchmarks import needs
from benchmarks.infinicache_pool import NodeChange, Way, node_changes, replay
from benchmarks.infinicache_requests import SHARED, Request, docker
from scavenger.trace import files

from infinicache import AsyncCache, CacheNode  # isort: skip
from infinicache.codec import code_for  # isort: skip
from infinicache.objects import CacheError  # isort: skip

KEY = b"a key for measuring"
DAY_S, LOOK_S = 86400.0, 10.0
REPAIRED_S = 60.0
"""Maximum wait for repairs, seconds."""


@dataclass
class RealPool:
    """Nodes of the cache in this process, which come and go by name."""

    memory: int
    """Memory of each node, bytes."""
    limit: int
    idle: dict[str, float] = field(default_factory=dict)
    """Idle node → time at which it became idle, seconds."""
    nodes: dict[str, CacheNode] = field(default_factory=dict)
    """The nodes in rank order."""
    departures: int = 0

    def fill(self) -> None:
        """Let idle nodes join up to the limit, those idle longest first."""
        for name, _ in sorted(self.idle.items(), key=lambda item: item[1]):
            if len(self.nodes) >= self.limit:
                break
            if name not in self.nodes:
                self.nodes[name] = CacheNode(self.memory, KEY, name=name)
        self._announce()

    async def lose(self, names: list[str]) -> None:
        """Remove nodes without notice."""
        gone = [self.nodes.pop(name) for name in names if name in self.nodes]
        for name in names:
            self.idle.pop(name, None)
        self.departures += len(gone)
        await asyncio.gather(*(node.close() for node in gone))
        if gone:
            self._announce()

    def _announce(self) -> None:
        addresses = [node.address for node in self.nodes.values()]
        number = max((node.number for node in self.nodes.values()), default=0) + 1
        for node in self.nodes.values():
            node.view(addresses, number=number)

    async def close(self) -> None:
        """End all nodes."""
        await asyncio.gather(*(node.close() for node in self.nodes.values()))


def content(key: str, size: int) -> bytes:
    """Return the value of a key: its bytes are derived from its name."""
    return hashlib.shake_128(key.encode()).digest(size)


async def _wait_for_repairs(cache: AsyncCache, pool: RealPool) -> None:
    """Wait until the proxy knows its nodes and has no repair left, at most REPAIRED_S."""
    deadline = time.monotonic() + REPAIRED_S
    while time.monotonic() < deadline:
        try:
            parts = await cache.summary()
        except (CacheError, ConnectionError):
            parts = []
        registered = sum(len(part["nodes"]) for part in parts)
        if registered == len(pool.nodes) and not any(part["waiting_repairs"] for part in parts):
            return
        await asyncio.sleep(0.02)


async def real(
    requests: list[Request],
    changes: list[NodeChange],
    pool: RealPool,
    scale: int,
    wait: bool,
) -> dict[str, Any]:
    """Send the requests to a real pool. Return the results.

    Args:
        requests: requests in order of time.
        changes: changes of nodes, in order of time.
        pool: a pool without nodes.
        scale: divisor of sizes.
        wait: whether to wait for repairs.
    """
    counts: dict[str, int] = defaultdict(int)
    looks = [(LOOK_S * k, 2, None) for k in range(int(requests[-1].time / LOOK_S) + 1)]
    events = heapq.merge(
        ((change.time, 0, change) for change in changes),
        ((request.time, 1, request) for request in requests),
        looks,
        key=lambda event: event[:2],
    )
    cache: AsyncCache | None = None
    for at, kind, what in events:
        if isinstance(what, Request):
            counts["gets"] += 1
            counts["bytes"] += what.size
            if not pool.nodes:
                continue
            if cache is None:
                cache = AsyncCache([n.address for n in pool.nodes.values()], KEY)
            await _request(cache, what, scale, counts)
        elif kind == 2:
            pool.fill()
        elif isinstance(what, NodeChange) and what.is_idle:
            pool.idle.update((name, at) for name in what.names if name not in pool.idle)
        elif isinstance(what, NodeChange):
            await pool.lose(what.names)
            if cache is not None and not pool.nodes:
                cache.close()
                cache = None
            if wait and cache is not None:
                await _wait_for_repairs(cache, pool)
    if cache is not None:
        counts["lost_objects"] = sum(part["lost"] for part in await cache.summary())
        cache.close()
    gets, size = counts["gets"], counts["bytes"]
    return {
        "gets": gets,
        "hit_ratio": counts["hits"] / max(1, gets),
        "byte_hit_ratio": counts["hit_bytes"] / max(1, size),
        "lost_objects": counts["lost_objects"],
        "refused": counts["refused"],
        "nodes_lost": pool.departures,
        "failed_gets": counts["failed"],
        "wrong": counts["wrong"],
    }


async def _request(cache: AsyncCache, request: Request, scale: int, counts: dict[str, int]) -> None:
    """Make a get, and a put on a miss."""
    value = content(request.key, max(1, request.size // scale))
    answer = None
    try:
        answer = await cache.get(request.key)
    except (CacheError, ConnectionError):
        counts["failed"] += 1
    if answer is not None:
        counts["hits"] += 1
        counts["hit_bytes"] += request.size
        counts["wrong"] += bytes(answer) != value
        return
    code = code_for(request.size)
    try:
        await cache.put(request.key, value, code=(code.d, code.p))
    except (CacheError, ConnectionError):
        counts["refused"] += 1


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--days", default="1", help="of the trace, counted from 0")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--nodes", type=int, default=16, help="the most the pool takes")
    parser.add_argument("--memory-gb", type=float, default=8.0, help="of a node, at full size")
    parser.add_argument("--scale", type=int, default=1000, help="divides sizes in the real pool")
    parser.add_argument("--wait", action="store_true", help="wait for repairs after departures")
    parser.add_argument(
        "--idle",
        type=Path,
        default=SHARED / "summit_idle_week1.csv.gz",
        metavar="FILE",
        help="trace of idle nodes (CSV time_s,node,event; also .gz)",
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    idle = files.read(needs.existing(options.idle, "--idle FILE", "when nodes are idle"))
    logging.getLogger("infinicache").setLevel(logging.ERROR)
    seconds, memory = 3600.0 * options.hours, int(options.memory_gb * 1e9)
    rows: list[dict[str, Any]] = []
    load = os.getloadavg()[0]
    for day in map(int, options.days.split(",")):
        begin = day * DAY_S
        requests = docker(seconds)
        # Without a forecast the cache takes the oldest nodes first.
        way = Way("by age", apart=True, foresight="age")
        pool = (memory, options.nodes)
        _, model = replay(requests, idle, (begin, seconds), pool, "all without", way)
        figures = {name: model[name] for name in ("gets", "hit_ratio", "byte_hit_ratio")}
        figures |= {name: model[name] for name in ("lost_objects", "refused", "nodes_lost")}
        rows.append({"day": day, "pool": "model", **figures})

        async def measured(begin: float = begin, requests: list[Request] = requests) -> Any:
            real_pool = RealPool(memory // options.scale, options.nodes)
            try:
                since, changes = node_changes(idle, begin, seconds)
                first = [NodeChange(at, True, [name]) for name, at in since.items()]
                changes = [*first, *changes]
                return await real(requests, changes, real_pool, options.scale, options.wait)
            finally:
                await real_pool.close()

        rows.append({"day": day, "pool": "real", **asyncio.run(measured())})
        print(json.dumps(rows[-2:]), file=sys.stderr, flush=True)
    if options.json:
        about = {"options": vars(options), "load": [load, os.getloadavg()[0]]}
        print(json.dumps({**about, "departures": rows}, indent=1, default=str))
        return
    shown = Shown(title="departures without notice")
    for column in rows[-1]:
        shown.add_column(column, justify="right")
    for row in rows:
        cells = (row.get(column, "") for column in rows[-1])
        shown.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in cells))
    Console(width=140).print(shown)


if __name__ == "__main__":
    main()
