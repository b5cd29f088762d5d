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
    """One request at ``time`` (seconds from the start): a put stores, a get reads and stores on a
    miss.
    """

    time: float
    put: bool
    key: str
    size: int


def _rows(name: str) -> Iterator[list[str]]:
    with gzip.open(SHARED / "cache_trace" / f"{name}.csv.gz", "rt") as file:
        rows = csv.reader(file)
        next(rows)
        yield from rows


def cloudphysics(seconds: float) -> list[Request]:
    """Two hours of block reads and writes, as they were timed."""
    rows = ((int(t) / 1e6, op, key, int(size)) for t, op, key, size in _rows("cloudphysics_io"))
    return [Request(t, op == "PUT", key, size) for t, op, key, size in rows if t < seconds]


def web(seconds: float) -> list[Request]:
    """Web requests, which have an order but no times: spread evenly."""
    rows = list(_rows("web_requests_bu98"))
    return [
        Request(i * seconds / len(rows), op == "PUT", key, int(size))
        for i, (_, op, key, size) in enumerate(rows)
    ]


def docker(seconds: float, objects: int = 6000, per_s: float = 0.5) -> list[Request]:
    """Layers of container images: sizes over nine orders of magnitude, 20 % above 10 MB; popularity
    as 1/rank.
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


REQUESTS: dict[str, Callable[[float], list[Request]]] = {
    "docker": docker,
    "cloudphysics": cloudphysics,
    "web": web,
}
