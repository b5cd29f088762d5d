"""Gradients synchronised through a key-value store, as SMLT does it, beside a ring.

    python -m benchmarks.kvsync [--workers 2 4 8] [--mb 1 10] [--repeats 5] [--delay-ms 30]
        [--contenders NAME ...] [--json FILE]

n worker processes of this machine have a gradient of G bytes each (float32) and end with the mean
of all n. Everything goes over the loopback interface. Contenders, which take turns in the same
processes:

* **ring**: ``torch.distributed.all_reduce`` with gloo; there is no store;
* **Redis, hierarchical**: the synchronisation of SMLT (Ali et al., 2022, arXiv:2205.01853), one
  Redis server;
* **Redis, all-to-all**: each worker reads the gradients of all;
* **files, hierarchical**, **files, all-to-all**: the same two with a file for each key, where each
  operation takes ``--delay-ms`` longer, as with an object store.

The bytes of each scheme are those of all its writes and reads. Hierarchical, with n shards:

1. each worker writes its gradient in shards: n · n · G/n = n · G;
2. worker k reads shard k of each gradient, its own too: n · n · G/n = n · G;
3. worker k writes the mean of shard k: n · G/n = G;
4. each worker reads the n means, its own too: n · n · G/n = n · G.

The sum is (3n + 1) · G, SMLT's count, so the model and the data, which SMLT's workers also load
from a store, are not part of it. All-to-all: each worker writes its gradient (n · G) and reads
those of all, its own too (n · n · G): (n² + n) · G. Workers that kept what they have themselves
would move (3n - 2) · G and n² · G. In the ring each worker sends 2 (n - 1) shards of G/n to the
next one: 2 (n - 1) · G.

``bytes / G`` is counted: payloads of the operations, and for the ring what the sockets of the
workers have received (TCP_INFO of Linux), of the repeat that deviates most from the formula.
``server / G`` is what Redis counts itself, protocol included. ``operations`` are those of one
worker, one after another.

A time is from the first worker's begin to the last one's end, without the computation of
gradients. Between writing and reading, workers wait for each other at a barrier of the operating
system and not by asking the store, which would take further operations. Each result is compared
with the mean, which is known in every bit: gradients are whole numbers, so their sums are exact in
any order.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from numpy.typing import NDArray

from benchmarks.redis_servers import RedisClient, redis_servers

MB = 10**6
PUBLISHED = "6 to 8"
"""How many times as long as Redis an object store takes, as SMLT publishes it."""
BYTES_RECEIVED = 128
"""Place of ``tcpi_bytes_received``, 8 bytes, in ``struct tcp_info`` (linux/tcp.h)."""

Gradient = NDArray[np.float32]


class Store(Protocol):
    """Keeps values by key."""

    def put(self, key: str, value: bytes) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Return a value that was written."""

    def clear(self) -> None:
        """Delete all values."""


class FolderStore:
    """A file for each key.

    Args:
        folder: where the files are; it exists.
        delay_s: how much longer an operation takes, seconds.
    """

    def __init__(self, folder: Path, delay_s: float) -> None:
        self._folder, self._delay_s = folder, delay_s

    def put(self, key: str, value: bytes) -> None:
        """See :class:`Store`."""
        time.sleep(self._delay_s)
        (self._folder / key).write_bytes(value)

    def get(self, key: str) -> bytes:
        """See :class:`Store`."""
        time.sleep(self._delay_s)
        return (self._folder / key).read_bytes()

    def clear(self) -> None:
        """See :class:`Store`."""
        for path in self._folder.iterdir():
            path.unlink()


class CountedStore:
    """Another store, and the payloads of its operations."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.bytes = 0
        """Written and read."""
        self.operations = 0

    def put(self, key: str, value: bytes) -> None:
        """See :class:`Store`."""
        self._store.put(key, value)
        self._count(value)

    def get(self, key: str) -> bytes:
        """See :class:`Store`."""
        value = self._store.get(key)
        self._count(value)
        return value

    def clear(self) -> None:
        """See :class:`Store`."""
        self._store.clear()

    def _count(self, value: bytes) -> None:
        self.bytes += len(value)
        self.operations += 1


# --- schemes ---

Scheme = Callable[[Store, Gradient, int, int, Callable[[], object]], Gradient]
"""(store, own gradient, rank, number of workers, wait for all workers) → mean of all gradients."""


def hierarchical(
    store: Store, gradient: Gradient, rank: int, workers: int, wait: Callable[[], object]
) -> Gradient:
    """Return the mean of all gradients; each worker computes it for one shard."""
    for shard, part in enumerate(np.array_split(gradient, workers)):
        store.put(f"{rank}-{shard}", part.tobytes())
    wait()
    store.put(f"mean-{rank}", _mean(store, [f"{k}-{rank}" for k in range(workers)]).tobytes())
    wait()
    means = [store.get(f"mean-{shard}") for shard in range(workers)]
    return np.frombuffer(b"".join(means), np.float32)


def all_to_all(
    store: Store, gradient: Gradient, rank: int, workers: int, wait: Callable[[], object]
) -> Gradient:
    """Return the mean of all gradients; each worker reads all of them."""
    store.put(f"{rank}", gradient.tobytes())
    wait()
    return _mean(store, [f"{k}" for k in range(workers)])


def _mean(store: Store, keys: Sequence[str]) -> Gradient:
    total = np.frombuffer(store.get(keys[0]), np.float32).copy()
    for key in keys[1:]:
        total += np.frombuffer(store.get(key), np.float32)
    return total / np.float32(len(keys))


SCHEMES: dict[str, Scheme] = {"hierarchical": hierarchical, "all-to-all": all_to_all}
STORES = ("Redis", "files")
CONTENDERS = ("ring", *(f"{store}, {scheme}" for store in STORES for scheme in SCHEMES))


def formula(contender: str, workers: int) -> int:
    """Return the bytes that a contender moves, as a multiple of the gradient's."""
    if contender == "ring":
        return 2 * (workers - 1)
    if contender.endswith("hierarchical"):
        return 3 * workers + 1
    return workers**2 + workers


# --- in a worker ---


@dataclass(frozen=True)
class Setting:
    """What one group of workers does."""

    workers: int
    sizes: tuple[int, ...]
    """Of a gradient, bytes; multiples of 4."""
    repeats: int
    delay_s: float
    """Of an operation on a file, seconds."""
    contenders: tuple[str, ...]
    port: int | None = None
    """Of Redis, if a contender uses it."""


@dataclass(frozen=True)
class Measurement:
    """One synchronisation, as one worker saw it."""

    contender: str
    gradient_bytes: int
    begin: float
    """Of the clock that all processes of the machine have, seconds."""
    end: float
    bytes: int
    operations: int
    server_bytes: int | None
    """What Redis counted, of all workers; only the first worker asks it."""


def gradient_of(rank: int, size: int) -> Gradient:
    """Return the gradient of a worker: whole numbers, whose sums are exact in float32.

    Args:
        rank: the worker; the seed.
        size: bytes.
    """
    return np.random.default_rng(rank).integers(-1000, 1000, size // 4).astype(np.float32)


def mean_gradient(workers: int, size: int) -> Gradient:
    """Return the mean of the gradients of all workers."""
    total = sum((gradient_of(rank, size) for rank in range(workers)), np.zeros(size // 4))
    return total.astype(np.float32) / np.float32(workers)


def check(result: Gradient, mean: Gradient, contender: str, rank: int) -> None:
    """Raise RuntimeError if a worker's result is not the mean of the gradients."""
    if not np.array_equal(result, mean):
        raise RuntimeError(f"{contender}: the result of worker {rank} is not the mean.")


def received_bytes() -> int:
    """Return the bytes that the TCP sockets of this process have received."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            own = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed since
        with own:
            if own.type == socket.SOCK_STREAM and own.family in (socket.AF_INET, socket.AF_INET6):
                info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, BYTES_RECEIVED)[0]
    return total


class Worker:
    """One worker of a group, without gradients of its own.

    Args:
        rank: which one it is.
        setting: of the group.
        wait: waits for all workers of the group.
        folder: shared by the group.
    """

    def __init__(self, rank: int, setting: Setting, wait: Callable[[], object], folder: Path):
        self._rank, self._setting, self._wait = rank, setting, wait
        self._redis = None if setting.port is None else RedisClient([setting.port])
        files = folder / "store"
        files.mkdir(exist_ok=True)
        stores: dict[str, Store] = {"files": FolderStore(files, setting.delay_s)}
        if self._redis is not None:
            stores["Redis"] = self._redis
        self._stores = {name: CountedStore(store) for name, store in stores.items()}

    def measure(self, contender: str, gradient: Gradient, mean: Gradient) -> Measurement:
        """Synchronise once, and check the result."""
        store = self._stores.get(contender.split(",")[0])
        ask = self._redis if self._rank == 0 and contender.startswith("Redis") else None
        own = gradient.copy()
        bytes_before, operations_before = self._counts(store)
        server_before = ask.traffic() if ask else 0
        self._wait()
        begin = time.monotonic()
        if store is None:
            tensor = torch.from_numpy(own)
            dist.all_reduce(tensor)
            result = (tensor / self._setting.workers).numpy()
        else:
            scheme = SCHEMES[contender.partition(", ")[2]]
            result = scheme(store, own, self._rank, self._setting.workers, self._wait)
        end = time.monotonic()
        self._wait()
        bytes_after, operations_after = self._counts(store)
        server = ask.traffic() - server_before if ask else None
        check(result, mean, contender, self._rank)
        self._wait()
        if store is not None and self._rank == 0:
            store.clear()
        return Measurement(
            contender,
            gradient.nbytes,
            begin,
            end,
            bytes_after - bytes_before,
            operations_after - operations_before,
            server,
        )

    @staticmethod
    def _counts(store: CountedStore | None) -> tuple[int, int]:
        return (received_bytes(), 0) if store is None else (store.bytes, store.operations)


def _run_worker(rank: int, setting: Setting, barrier: Barrier, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=setting.workers
    )
    worker = Worker(rank, setting, barrier.wait, folder)
    measurements = []
    for size in setting.sizes:
        gradient, mean = gradient_of(rank, size), mean_gradient(setting.workers, size)
        for repeat in range(setting.repeats + 1):  # the first one is for warming up
            for contender in setting.contenders:
                measurement = worker.measure(contender, gradient, mean)
                if repeat:
                    measurements.append(asdict(measurement))
    (folder / f"worker-{rank}.json").write_text(json.dumps(measurements))
    dist.destroy_process_group()


# --- account ---


@dataclass(frozen=True)
class Row:
    """One contender with so many workers and such a gradient."""

    workers: int
    gradient_bytes: int
    contender: str
    seconds: tuple[float, ...]
    """Of each repeat."""
    bytes: int
    """Of all workers, in the repeat that deviates most from the formula."""
    server_bytes: int | None
    """What Redis counted, in the same way."""
    operations: int
    """Of one worker."""
    formula: int
    """Expected ``bytes`` as a multiple of the gradient's."""
    load: float
    """Load average before the group began."""

    @property
    def median_s(self) -> float:
        """Median of the repeats, seconds."""
        return statistics.median(self.seconds)


def run(setting: Setting, start_method: str = "spawn") -> list[Row]:
    """Run one group of workers. Return a row for each size and contender.

    Args:
        setting: of the group.
        start_method: how :mod:`multiprocessing` starts the workers.

    Raises:
        mp.ProcessRaisedException: a worker failed, or its result is not the mean.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="kvsync-") as name:
        folder = Path(name)
        barrier = mp.get_context(start_method).Barrier(setting.workers)
        arguments = (setting, barrier, folder)
        mp.start_processes(
            _run_worker, arguments, nprocs=setting.workers, start_method=start_method
        )
        texts = [(folder / f"worker-{k}.json").read_text() for k in range(setting.workers)]
    of_workers = [[Measurement(**row) for row in json.loads(text)] for text in texts]
    repeats = list(zip(*of_workers, strict=True))
    return [
        _row([same for same in repeats if _case(same[0]) == (size, contender)], load)
        for size in setting.sizes
        for contender in setting.contenders
    ]


def _case(one: Measurement) -> tuple[int, str]:
    return one.gradient_bytes, one.contender


def _row(repeats: Sequence[Sequence[Measurement]], load: float) -> Row:
    first, workers = repeats[0][0], len(repeats[0])
    times = formula(first.contender, workers)

    def farthest(counts: Sequence[int]) -> int:
        return max(counts, key=lambda count: abs(count - times * first.gradient_bytes))

    servers = [same[0].server_bytes for same in repeats]
    return Row(
        workers,
        first.gradient_bytes,
        first.contender,
        tuple(max(one.end for one in same) - min(one.begin for one in same) for same in repeats),
        farthest([sum(one.bytes for one in same) for same in repeats]),
        farthest([count for count in servers if count is not None]) if any(servers) else None,
        max(one.operations for same in repeats for one in same),
        times,
        load,
    )


def show(rows: Sequence[Row]) -> str:
    """Return the table, and below it how long files take relative to Redis."""
    lines = [
        f"{'workers':>7}{'MB':>6}  {'contender':22}{'median ms':>10}{'min':>9}{'max':>9}"
        f"{'bytes / G':>11}{'formula':>9}{'server / G':>12}{'operations':>12}"
    ]
    for row in rows:
        server = "-" if row.server_bytes is None else f"{row.server_bytes / row.gradient_bytes:.3f}"
        lines.append(
            f"{row.workers:>7}{row.gradient_bytes / MB:>6g}  {row.contender:22}"
            f"{1e3 * row.median_s:>10.1f}{1e3 * min(row.seconds):>9.1f}"
            f"{1e3 * max(row.seconds):>9.1f}{row.bytes / row.gradient_bytes:>11.3f}"
            f"{row.formula:>9}{server:>12}{row.operations or '-':>12}"
        )
    medians = {(row.workers, row.gradient_bytes, row.contender): row.median_s for row in rows}
    lines.append(f"time of files ÷ time of Redis (published: {PUBLISHED})")
    for workers, size in dict.fromkeys((row.workers, row.gradient_bytes) for row in rows):
        ratios = [
            f"{scheme} {files / redis:.1f}"
            for scheme in SCHEMES
            if (files := medians.get((workers, size, f"files, {scheme}")))
            and (redis := medians.get((workers, size, f"Redis, {scheme}")))
        ]
        lines.append(f"{workers:>7}{size / MB:>6g}  {', '.join(ratios) or '-'}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all groups of workers and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kvsync",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", type=int, nargs="+", default=(2, 4, 8))
    parser.add_argument("--mb", type=float, nargs="+", default=(1.0, 10.0), help="of a gradient")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=30.0, help="of an operation on a file")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    with ExitStack() as stack:
        port = None
        if any(contender.startswith("Redis") for contender in options.contenders):
            port = int(stack.enter_context(redis_servers(1)).addresses[0])
        for workers in options.workers:
            setting = Setting(
                workers,
                tuple(int(mb * MB) // 4 * 4 for mb in options.mb),
                options.repeats,
                options.delay_ms / 1e3,
                tuple(options.contenders),
                port,
            )
            rows += run(setting)
            print(f"{workers} workers: done", file=sys.stderr, flush=True)
    print(show(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
