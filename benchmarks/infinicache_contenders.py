"""The contenders of :mod:`benchmarks.infinicache`: cache nodes as processes of this machine, and a
client of them or of :mod:`benchmarks.redis_servers`.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.redis_servers import RedisClient, Servers

HOME = Path(__file__).resolve().parents[1] / "jobscripts" / "infinicache"
sys.path.insert(0, str(HOME))

from infinicache import Cache, CacheNode  # noqa: E402

KEY = b"a key for measuring"
LATE_SHARE, LATE_S = 0.005, 0.3
"""The straggler: share of the reads of chunks that each node answers late, and the delay. One in 20
objects of 10 chunks has a late chunk, and one in 1000 two.
"""


async def node(capacity: int, late_share: float, proxies: int) -> None:
    """Run one cache node: print its address, then read those of all."""
    own = CacheNode(capacity, KEY, proxies=proxies)
    rng = random.Random(os.getpid())
    if late_share:
        own.server.delay_s = lambda op: LATE_S if op == "get" and rng.random() < late_share else 0.0
    print(own.address, flush=True)
    members = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    own.view(members.split())
    await asyncio.get_running_loop().run_in_executor(
        None, sys.stdin.readline
    )  # until the benchmark ends


@contextmanager
def cache_nodes(count: int, late_share: float = 0.0, proxies: int = 1) -> Iterator[Servers]:
    """Start ``count`` cache nodes."""
    about = [str(late_share), str(proxies)]
    argv = [sys.executable, "-m", "benchmarks.infinicache", "--as-node", *about]
    processes = [
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        addresses = [p.stdout.readline().strip() for p in processes if p.stdout]
        for p in processes:
            assert p.stdin
            p.stdin.write(" ".join(addresses) + "\n")
            p.stdin.flush()
        yield Servers(addresses, [p.pid for p in processes])
    finally:
        for p in processes:
            p.kill()
            p.wait()


class ViewingCache(Cache):
    """A cache whose gets return views."""

    def get(self, key: str, loader: Any = None) -> Any:
        return self.get_view(key, loader)


def contender(name: str, where: list[str]) -> Any:
    """Return a client by its name: ``redis``; a code such as ``10+1``; ``10+1 near`` with a near
    cache of 64 MB; or ``10+1 near views``, which copies nothing out of it.
    """
    if name == "redis":
        return RedisClient([int(port) for port in where])
    code, *near = name.split()
    data, parity = map(int, code.split("+"))
    made = ViewingCache if "views" in near else Cache
    return made(where, KEY, code=(data, parity), near_bytes=64_000_000 if near else 0)
