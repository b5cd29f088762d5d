"""Redis servers as processes of this machine, and a client of them.

Benchmarks that use them need the program ``redis-server`` and the extra ``redis``.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from tests.ports import free_ports
from tests.waiting import until

REDIS_READ = 8 << 20
"""Bytes that redis-py reads at once; its default of 64 KiB is half as fast for large values."""


@dataclass(frozen=True)
class Servers:
    """Processes that serve."""

    addresses: list[str]
    """``host:port``, or ports of Redis."""
    pids: list[int]
    """Of each."""

    def cpu_s(self) -> float:
        """CPU time that they have used, in all."""
        times = [psutil.Process(pid).cpu_times() for pid in self.pids]
        return sum(t.user + t.system for t in times)


@contextmanager
def redis_servers(count: int) -> Iterator[Servers]:
    """So many Redis servers without persistence."""
    import redis

    first, reservation = free_ports(count)
    ports, processes = range(first, first + count), []

    def answers(port: int, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, f"Redis ended with status {process.returncode}."
        try:
            return bool(redis.Redis(port=port).ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    try:
        for port in ports:
            argv = [
                "redis-server",
                "--port",
                str(port),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--appendonly",
                "no",
            ]
            processes.append(subprocess.Popen(argv, stdout=subprocess.DEVNULL))
        for port, process in zip(ports, processes, strict=True):
            until(lambda port=port, process=process: answers(port, process), "Redis answers")
        yield Servers([str(port) for port in ports], [p.pid for p in processes])
    finally:
        for p in processes:
            p.kill()
            p.wait()
        reservation.close()


class RedisClient:
    """Redis servers as one store: each key on the server that its hash names."""

    def __init__(self, ports: Sequence[int]) -> None:
        import redis

        # Newer clients send a request again after 5 s, and its bytes would count twice.
        options = {"socket_read_size": REDIS_READ, "socket_timeout": None}
        self._servers = [redis.Redis(port=port, **options) for port in ports]

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

    def clear(self) -> None:
        """Delete all keys."""
        for server in self._servers:
            server.flushall()

    def traffic(self) -> int:
        """Return the bytes that the servers have read from sockets and written to them."""
        counts = [server.info("stats") for server in self._servers]
        return sum(
            int(count["total_net_input_bytes"]) + int(count["total_net_output_bytes"])
            for count in counts
        )

    def close(self) -> None:
        for server in self._servers:
            server.close()
