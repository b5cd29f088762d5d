"""The cache of jobscripts/infinicache beside Redis on this machine: latency, a straggler, several
clients, the codec.

    python -m benchmarks.infinicache [--part latency,straggler,clients,codec] [--nodes 12]
        [--quick] [--json]

Every cache node is a process, and so are the Redis servers (one; or as many as cache nodes, with
keys assigned to them by hash in the client). All are reached by plain sockets on the loopback.
Contenders alternate after each operation, so that other load affects them equally. With fewer than
100 operations the p99 is the longest. Redis stores nothing on disk; its client is redis-py with the
hiredis parser.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import needs
from benchmarks.infinicache_contenders import (
    LATE_SHARE,
    cache_nodes,
    contender,
    node,
)
from benchmarks.redis_servers import redis_servers

MB = 1_000_000
CODES = ((10, 0), (10, 1), (10, 2), (4, 2), (5, 1))
SIZES_MB = {1: 100, 10: 100, 40: 25, 100: 10}
"""Size → number of operations of each contender."""
STRAGGLER_CODES = ((10, 0), (10, 1), (10, 2))
CLIENTS = (1, 2, 5, 10)
CLIENT_SECONDS = 3.0


def quantile(values: list[float], q: float) -> float:
    """Return the q-quantile, by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def compare(clients: dict[str, Any], size: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return name → operation → seconds. The contenders alternate."""
    value = random.Random(size).randbytes(size)
    took: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in clients}
    for turn in range(rounds + 1):  # the first one warms up
        for name, client in clients.items():
            key = f"{name} {size}"
            began = time.perf_counter()
            client.put(key, value)
            put = time.perf_counter()
            answer = client.get(key)
            got = time.perf_counter()
            if len(answer) != size or answer != value:
                raise RuntimeError(f"{name} returned wrong bytes.")
            if turn:
                took[name]["put"].append(put - began)
                took[name]["get"].append(got - put)
    for name, client in clients.items():
        client.delete(f"{name} {size}")
    return took


def latency(nodes: int, quick: bool) -> list[dict[str, Any]]:
    """Measure GET and PUT by size and code, beside Redis."""
    rows = []
    with ExitStack() as stack:
        addresses = stack.enter_context(cache_nodes(nodes)).addresses
        one = stack.enter_context(redis_servers(1)).addresses
        many = stack.enter_context(redis_servers(nodes)).addresses
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
    """Measure GET of 10 MB while nodes are sometimes late."""
    rows = []
    with cache_nodes(nodes, LATE_SHARE) as late:
        clients = {f"{d}+{p}": contender(f"{d}+{p}", late.addresses) for d, p in STRAGGLER_CODES}
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
    """One client process: makes GETs until the time is over, and prints their number and their
    processor time.
    """
    client = contender(name, where)
    for i in range(4):  # connections, memory and, if used, the near cache
        client.get(f"shared {i}")
    print("ready", flush=True)
    sys.stdin.readline()
    end, count, cpu = time.perf_counter() + seconds, 0, time.process_time()
    while time.perf_counter() < end:
        for i in range(4):
            if client.get(f"shared {i}") is None:
                raise RuntimeError("an object is missing")
            count += 1
    print(count, time.process_time() - cpu, flush=True)


def clients(nodes: int, quick: bool) -> list[dict[str, Any]]:
    """Measure GETs of 10 MB by several simultaneous processes."""
    seconds = 1.0 if quick else CLIENT_SECONDS
    rows = []
    with ExitStack() as stack:
        cache = stack.enter_context(cache_nodes(nodes))
        shared = stack.enter_context(cache_nodes(nodes + nodes % 3, proxies=3))
        contenders = {
            "1 Redis": ("redis", stack.enter_context(redis_servers(1))),
            f"{nodes} Redis": ("redis", stack.enter_context(redis_servers(nodes))),
            "10+1": ("10+1", cache),
            "3+1, 1 proxy": ("3+1", cache),
            "3+1, 3 proxies": ("3+1", shared),
            "10+1 and near": ("10+1 near", cache),
            "10+1, near, views": ("10+1 near views", cache),
        }
        for kind, servers in contenders.values():
            client = contender(kind, servers.addresses)
            for i in range(4):
                client.put(f"shared {i}", random.Random(i).randbytes(10 * MB))
            client.close()
        for count in CLIENTS:
            for name, (kind, servers) in contenders.items():
                argv = [
                    sys.executable,
                    "-m",
                    "benchmarks.infinicache",
                    "--as-client",
                    kind,
                    str(seconds),
                    *servers.addresses,
                ]
                workers = [
                    subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                    for _ in range(count)
                ]
                for w in workers:
                    assert w.stdout
                    w.stdout.readline()
                began, served = time.perf_counter(), servers.cpu_s()
                for w in workers:
                    assert w.stdin
                    w.stdin.write("go\n")
                    w.stdin.flush()
                outputs = [w.communicate()[0].split() for w in workers]
                took, served = time.perf_counter() - began, servers.cpu_s() - served
                done, used = sum(int(n) for n, _ in outputs), sum(float(s) for _, s in outputs)
                rows.append(
                    {
                        "clients": count,
                        "contender": name,
                        "mb_per_s": done * 10 / took,
                        "cores": (used + served) / took,
                        "mb_per_cpu_s": done * 10 / (used + served),
                        "of_it_clients": used / (used + served),
                    }
                )
    return rows


def codec(nodes: int, quick: bool) -> list[dict[str, Any]]:
    """Measure encoding, and decoding with p data chunks lost, of 10 MB on one core: GB/s of the
    object (the best of several runs).
    """
    from infinicache.codec import Code, encode, rebuild

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

        encoding = best(partial(encode, data, code))
        decoding = best(partial(rebuild, have, range(p), made, code))
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


def verdicts(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the targets, met or missed."""
    sentences = []
    rows = {(r["size_mb"], r["contender"]): r for r in results.get("latency", [])}
    for mb in (10, 40, 100):
        if (mb, "10+1") in rows:
            for q, code in itertools.product(
                ("get_p50_ms", "get_p99_ms", "put_p50_ms", "put_p99_ms"), ("10+1", "10+2")
            ):
                ours, theirs = rows[mb, code][q], rows[mb, "1 Redis"][q]
                sentences.append(
                    f"{'met' if ours < theirs else 'missed'}: {mb} MB {code} {q}: {ours:.1f} "
                    f"against {theirs:.1f}"
                )
    late = {r["contender"]: r["get_p99_ms"] for r in results.get("straggler", [])}
    if late:
        sentences.append(
            f"{'met' if late['10+1'] < late['10+0'] else 'missed'}: straggler p99: "
            f"{late['10+1']:.1f} against {late['10+0']:.1f} ms"
        )
    for r in results.get("codec", []):
        sentences.append(
            f"{'met' if r['both'] >= 1 else 'missed'}: {r['code']} encode+decode "
            f"{r['both']:.2f} GB/s"
        )
    return sentences


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default=",".join(PARTS))
    parser.add_argument("--nodes", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="few operations, to test that it runs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--as-node", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--as-client", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_node:
        late, proxies = options.as_node
        asyncio.run(node(2 << 30, float(late), int(proxies)))
        return
    if options.as_client:
        _client(options.as_client[0], options.as_client[2:], float(options.as_client[1]))
        return
    parts = options.part.split(",")
    if {"latency", "clients"} & {*parts} and shutil.which("redis-server") is None:
        parser.error("redis-server is not installed (Debian: apt-get install redis-server)")
    if {"latency", "clients"} & {*parts}:
        needs.package("redis")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"--part {', '.join(unknown)} is none of {', '.join(PARTS)}")
    before = os.getloadavg()
    results = {part: PARTS[part](options.nodes, options.quick) for part in parts}
    about = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": [before[0], os.getloadavg()[0]],
    }
    if options.json:
        print(json.dumps({"about": about, **results, "targets": verdicts(results)}, indent=1))
        return
    console = Console(width=140)
    for part, rows in results.items():
        shown = Table(
            title=f"{part} ({options.nodes} nodes, {os.cpu_count()} cores, load {before[0]:.1f} "
            f"to {os.getloadavg()[0]:.1f})"
        )
        for name in rows[0]:
            shown.add_column(name, justify="right")
        for row in rows:
            shown.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
        console.print(shown)
    for line in verdicts(results):
        console.print(line)


if __name__ == "__main__":
    main()
