"""The cache of jobscripts/infinicache beside Redis on this machine: latency, a straggler, several
clients, the codec.

    python -m benchmarks.infinicache [--part latency,straggler,clients,codec] [--nodes 12] [--quick]
    [--json]

Every cache node is a process, as are the Redis servers (one; and as many as cache nodes, keys
shared out over them by hash in the client). All are reached over plain sockets on the loopback.
Contenders take turns, one operation each, so that they meet the same neighbours; with fewer than
100 operations the p99 is the longest. Redis keeps nothing on disk; its client is redis-py with the
hiredis parser.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import platform
import random
import shutil
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HOME = Path(__file__).resolve().parents[1] / "jobscripts" / "infinicache"
sys.path.insert(0, str(HOME))

from infinicache import Cache, CacheNode, Code  # noqa: E402
from infinicache.codec import encode, rebuild  # noqa: E402

MB = 1_000_000
KEY = b"a key for measuring"
CODES = ((10, 0), (10, 1), (10, 2), (4, 2), (5, 1))
SIZES_MB = {1: 100, 10: 100, 40: 25, 100: 10}
"""Size → operations of each contender."""
LATE_SHARE, LATE_S = 0.005, 0.3
"""The straggler: each node answers this share of the reads of chunks so much later. One in 20
objects of 10 chunks has a late one, and one in 1000 two.
"""
STRAGGLER_CODES = ((10, 0), (10, 1), (10, 2))
CLIENTS = (1, 2, 5, 10)
REDIS_READ = 8 << 20
"""Bytes that redis-py reads at once; its default of 64 KiB is half as fast for large values."""
CLIENT_SECONDS = 3.0


# --- processes ---


async def _node(capacity: int, late_share: float) -> None:
    """One cache node: prints its address, reads those of all."""
    node = CacheNode(capacity, KEY)
    rng = random.Random(os.getpid())
    if late_share:
        node.server.delay_s = lambda op: (
            LATE_S if op == "get" and rng.random() < late_share else 0.0
        )
    print(node.address, flush=True)
    members = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    node.view(members.split())
    await asyncio.get_running_loop().run_in_executor(
        None, sys.stdin.readline
    )  # until the benchmark ends


@contextmanager
def cache_nodes(count: int, late_share: float = 0.0) -> Iterator[list[str]]:
    """So many cache nodes; their addresses."""
    argv = [sys.executable, "-m", "benchmarks.infinicache", "--as-node", str(late_share)]
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
        yield addresses
    finally:
        for p in processes:
            p.kill()
            p.wait()


@contextmanager
def redis_servers(count: int) -> Iterator[list[int]]:
    """So many Redis servers without persistence; their ports."""
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
        yield ports
    finally:
        for p in processes:
            p.kill()
            p.wait()


class RedisClient:
    """Redis servers as one store: each key on the server that its hash names."""

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


def contender(name: str, where: list[str]) -> Any:
    """A client by name: ``redis``, or a code such as ``10+1``."""
    if name == "redis":
        return RedisClient([int(port) for port in where])
    return Cache(where, KEY, code=tuple(map(int, name.split("+"))))  # type: ignore[arg-type]


# --- measuring ---


def quantile(values: list[float], q: float) -> float:
    """The q-quantile, nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def compare(clients: dict[str, Any], size: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Name → operation → seconds; the contenders take turns."""
    value = random.Random(size).randbytes(size)
    took: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in clients}
    for turn in range(rounds + 1):  # the first is for warming up
        for name, client in clients.items():
            key = f"{name} {size}"
            began = time.perf_counter()
            client.put(key, value)
            put = time.perf_counter()
            found = client.get(key)
            got = time.perf_counter()
            if len(found) != size or found != value:
                raise RuntimeError(f"{name} returned wrong bytes.")
            if turn:
                took[name]["put"].append(put - began)
                took[name]["get"].append(got - put)
    for name, client in clients.items():
        client.delete(f"{name} {size}")
    return took


def latency(nodes: int, quick: bool) -> list[dict[str, Any]]:
    """GET and PUT by size and code, beside Redis."""
    rows = []
    with ExitStack() as stack:
        addresses = stack.enter_context(cache_nodes(nodes))
        one = [str(p) for p in stack.enter_context(redis_servers(1))]
        many = [str(p) for p in stack.enter_context(redis_servers(nodes))]
        clients = {"1 Redis": contender("redis", one), f"{nodes} Redis": contender("redis", many)}
        clients |= {f"{d}+{p}": contender(f"{d}+{p}", addresses) for d, p in CODES}
        for mb, rounds in SIZES_MB.items():
            took = compare(clients, mb * MB, max(3, rounds // 10) if quick else rounds)
            for name, operations in took.items():
                row: dict[str, Any] = {
                    "size_mb": mb,
                    "contender": name,
                    "operations": len(operations["get"]),
                }
                for operation, seconds in operations.items():
                    row |= {
                        f"{operation}_p50_ms": 1e3 * quantile(seconds, 0.5),
                        f"{operation}_p99_ms": 1e3 * quantile(seconds, 0.99),
                    }
                rows.append(row)
        for client in clients.values():
            client.close()
    return rows


def straggler(nodes: int, quick: bool) -> list[dict[str, Any]]:
    """GET of 10 MB while nodes are late now and then."""
    rows = []
    with cache_nodes(nodes, LATE_SHARE) as addresses:
        clients = {f"{d}+{p}": contender(f"{d}+{p}", addresses) for d, p in STRAGGLER_CODES}
        for name, operations in compare(clients, 10 * MB, 20 if quick else 200).items():
            seconds = operations["get"]
            rows.append(
                {
                    "contender": name,
                    "get_p50_ms": 1e3 * quantile(seconds, 0.5),
                    "get_p99_ms": 1e3 * quantile(seconds, 0.99),
                }
            )
        for client in clients.values():
            client.close()
    return rows


def _client(name: str, where: list[str], seconds: float) -> None:
    """One client process: GETs until the time is over; prints how many."""
    client = contender(name, where)
    print("ready", flush=True)
    sys.stdin.readline()
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        for i in range(4):
            if client.get(f"shared {i}") is None:
                raise RuntimeError("an object is missing")
            count += 1
    print(count, flush=True)


def clients(nodes: int, quick: bool) -> list[dict[str, Any]]:
    """GETs of 10 MB by several processes at once."""
    seconds = 1.0 if quick else CLIENT_SECONDS
    rows = []
    with ExitStack() as stack:
        contenders = {
            "1 Redis": ("redis", [str(p) for p in stack.enter_context(redis_servers(1))]),
            f"{nodes} Redis": (
                "redis",
                [str(p) for p in stack.enter_context(redis_servers(nodes))],
            ),
            "10+1": ("10+1", stack.enter_context(cache_nodes(nodes))),
        }
        for kind, where in contenders.values():
            client = contender(kind, where)
            for i in range(4):
                client.put(f"shared {i}", random.Random(i).randbytes(10 * MB))
            client.close()
        for count in CLIENTS:
            for name, (kind, where) in contenders.items():
                argv = [
                    sys.executable,
                    "-m",
                    "benchmarks.infinicache",
                    "--as-client",
                    kind,
                    str(seconds),
                    *where,
                ]
                workers = [
                    subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                    for _ in range(count)
                ]
                for w in workers:
                    assert w.stdout
                    w.stdout.readline()
                began = time.perf_counter()
                for w in workers:
                    assert w.stdin
                    w.stdin.write("go\n")
                    w.stdin.flush()
                done = sum(int(w.communicate()[0]) for w in workers)
                rows.append(
                    {
                        "clients": count,
                        "contender": name,
                        "mb_per_s": done * 10 / (time.perf_counter() - began),
                    }
                )
    return rows


def codec(nodes: int, quick: bool) -> list[dict[str, Any]]:
    """Encoding, and decoding with p data chunks lost, of 10 MB on one core: GB/s of the object
    (best of several, as code is measured).
    """
    data = random.Random(0).randbytes(10 * MB)
    rows = []
    for d, p in (*CODES[1:], (20, 4)):
        code = Code(d, p)
        chunks = encode(data, code)
        have = {i: c for i, c in enumerate(chunks) if i >= p}
        made = [bytearray(len(chunks[0])) for _ in range(p)]

        def best(work: Callable[[], Any]) -> float:
            times = []
            for _ in range(5 if quick else 40):
                began = time.thread_time()
                work()
                times.append(time.thread_time() - began)
            return min(times)

        encoding = best(lambda code=code: encode(data, code))  # type: ignore[misc]
        decoding = best(
            lambda have=have, made=made, code=code: rebuild(have, range(len(made)), made, code)
        )  # type: ignore[misc]
        size = len(data) / 1e9
        rows.append(
            {
                "code": str(code),
                "encode": size / encoding,
                "decode": size / decoding,
                "both": size / (encoding + decoding),
            }
        )
    return rows


PARTS: dict[str, Callable[[int, bool], list[dict[str, Any]]]] = {
    "latency": latency,
    "straggler": straggler,
    "clients": clients,
    "codec": codec,
}


def verdicts(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The targets, met or missed."""
    said = []
    rows = {(r["size_mb"], r["contender"]): r for r in found.get("latency", [])}
    for mb in (10, 40, 100):
        if (mb, "10+1") in rows:
            for q, code in itertools.product(
                ("get_p50_ms", "get_p99_ms", "put_p50_ms", "put_p99_ms"), ("10+1", "10+2")
            ):
                ours, theirs = rows[mb, code][q], rows[mb, "1 Redis"][q]
                said.append(
                    f"{'met' if ours < theirs else 'missed'}: {mb} MB {code} {q}: {ours:.1f} "
                    f"against {theirs:.1f}"
                )
    late = {r["contender"]: r["get_p99_ms"] for r in found.get("straggler", [])}
    if late:
        said.append(
            f"{'met' if late['10+1'] < late['10+0'] else 'missed'}: straggler p99: "
            f"{late['10+1']:.1f} against {late['10+0']:.1f} ms"
        )
    for r in found.get("codec", []):
        said.append(
            f"{'met' if r['both'] >= 1 else 'missed'}: {r['code']} encode+decode "
            f"{r['both']:.2f} GB/s"
        )
    return said


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default=",".join(PARTS))
    parser.add_argument("--nodes", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="few operations: to see that it runs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--as-node", metavar="SHARE", help=argparse.SUPPRESS)
    parser.add_argument("--as-client", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_node:
        asyncio.run(_node(2 << 30, float(options.as_node)))
        return
    if options.as_client:
        _client(options.as_client[0], options.as_client[2:], float(options.as_client[1]))
        return
    if shutil.which("redis-server") is None:
        parser.error("redis-server is not installed (Debian: apt-get install redis-server)")
    before = os.getloadavg()
    found = {part: PARTS[part](options.nodes, options.quick) for part in options.part.split(",")}
    about = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": [before[0], os.getloadavg()[0]],
    }
    if options.json:
        print(json.dumps({"about": about, **found, "targets": verdicts(found)}, indent=1))
        return
    console = Console(width=140)
    for part, rows in found.items():
        shown = Table(
            title=f"{part} ({options.nodes} nodes, {os.cpu_count()} cores, load {before[0]:.1f} "
            f"to {os.getloadavg()[0]:.1f})"
        )
        for name in rows[0]:
            shown.add_column(name, justify="right")
        for row in rows:
            shown.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
        console.print(shown)
    for line in verdicts(found):
        console.print(line)


if __name__ == "__main__":
    main()
