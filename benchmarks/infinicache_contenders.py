"""The contenders of :mod:`benchmarks.infinicache`: cache nodes and Redis servers as processes of
this machine, and a client of each.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

HOME = Path(__file__).resolve().parents[1] / "jobscripts" / "infinicache"
sys.path.insert(0, str(HOME))

from infinicache import Cache, CacheNode  # noqa: E402

KEY = b"a key for measuring"
LATE_SHARE, LATE_S = 0.005, 0.3
"""The straggler: share of the reads of chunks that each node answers late, and the delay. One in 20
objects of 10 chunks has a late chunk, and one in 1000 two.
"""
REDIS_READ = 8 << 20
"""Bytes that redis-py reads at once; with its default of 64 KiB it is half as fast for large
values.
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


@dataclass(frozen=True)
class Servers:
    """Processes that serve."""

    addresses: list[str]
    """``host:port``, or ports of Redis."""
    pids: list[int]
    """Process id of each."""

    def cpu_s(self) -> float:
        """Their processor time so far, in total."""
        times = [psutil.Process(pid).cpu_times() for pid in self.pids]
        return sum(t.user + t.system for t in times)


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


@contextmanager
def redis_servers(count: int) -> Iterator[Servers]:
    """Start ``count`` Redis servers without persistence."""
    import redis

    ports, processes = [], []
    try:
        for _ in range(count):
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                ports.append(s.getsockname()[1])
            argv = [
                "redis-server",
                "--port",
                str(ports[-1]),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--appendonly",
                "no",
            ]
            processes.append(subprocess.Popen(argv, stdout=subprocess.DEVNULL))
        for port in ports:
            deadline = time.monotonic() + 20
            while True:
                try:
                    redis.Redis(port=port).ping()
                    break
                except redis.ConnectionError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
        yield Servers([str(port) for port in ports], [p.pid for p in processes])
    finally:
        for p in processes:
            p.kill()
            p.wait()


class RedisClient:
    """Redis servers as one store: each key is on the server given by its hash."""

    def __init__(self, ports: list[int]) -> None:
        import redis

        self._servers = [redis.Redis(port=port, socket_read_size=REDIS_READ) for port in ports]

    def _server(self, key: str) -> Any:
        return self._servers[
            int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big")
            % len(self._servers)
        ]

    def put(self, key: str, value: bytes) -> None:
        self._server(key).set(key, value)

    def get(self, key: str) -> Any:
        return self._server(key).get(key)

    def delete(self, key: str) -> None:
        self._server(key).delete(key)

    def close(self) -> None:
        for server in self._servers:
            server.close()


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
