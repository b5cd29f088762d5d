"""Requests that :mod:`benchmarks.infinicache_replay` replays: two real traces
(../shared/data/cache_trace/), and a synthetic one like a registry of container images.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@dataclass(frozen=True)
class Request:
    """A request at ``time`` (seconds from the start): a put stores; a get reads, and stores on a
    miss.
    """

    time: float
    put: bool
    key: str
    size: int


CACHE_TRACES = {"cloudphysics": "cloudphysics_io", "web": "web_requests_bu98"}
"""Name of requests → name of their trace."""


def _rows(file_of_trace: Path) -> Iterator[list[str]]:
    with gzip.open(file_of_trace, "rt") as file:
        rows = csv.reader(file)
        next(rows)
        yield from rows


def trace_file(folder: Path, name: str) -> Path:
    """Return the trace of these requests in a folder of traces."""
    return folder / f"{CACHE_TRACES[name]}.csv.gz"


def cloudphysics(seconds: float, traces: Path = SHARED / "cache_trace") -> list[Request]:
    """Return two hours of block reads and writes, with their times."""
    read = _rows(trace_file(traces, "cloudphysics"))
    rows = ((int(t) / 1e6, op, key, int(size)) for t, op, key, size in read)
    return [Request(t, op == "PUT", key, size) for t, op, key, size in rows if t < seconds]


def web(seconds: float, traces: Path = SHARED / "cache_trace") -> list[Request]:
    """Return web requests, which have an order but no times, evenly spread over the time."""
    rows = list(_rows(trace_file(traces, "web")))
    return [
        Request(i * seconds / len(rows), op == "PUT", key, int(size))
        for i, (_, op, key, size) in enumerate(rows)
    ]


def docker(seconds: float, objects: int = 6000, per_s: float = 0.5) -> list[Request]:
    """Return requests for layers of container images: sizes over nine orders of magnitude, 20 %
    above 10 MB; popularity as 1/rank.
    """
    rng = random.Random(7)
    sizes = [
        int(10 ** (rng.uniform(7, 9.3) if rng.random() < 0.2 else rng.uniform(0.3, 7)))
        for _ in range(objects)
    ]
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(objects)))
    order = rng.sample(range(objects), objects)
    count = int(seconds * per_s)
    times = sorted(rng.uniform(0, seconds) for _ in range(count))
    ranks = rng.choices(range(objects), cum_weights=weights, k=count)
    return [
        Request(t, False, str(order[r]), sizes[order[r]]) for t, r in zip(times, ranks, strict=True)
    ]


REQUESTS: dict[str, Callable[[float, Path], list[Request]]] = {
    "docker": lambda seconds, traces: docker(seconds),
    "cloudphysics": cloudphysics,
    "web": web,
}
"""Return name → requests of ``seconds`` seconds, from a folder of traces."""
