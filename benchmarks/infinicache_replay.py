"""The cache on real idle nodes: requests of a trace against a pool that follows the idle nodes of
another one.

    python -m benchmarks.infinicache_replay [--hours 24] [--nodes 32] [--memory-gb 8] [--requests
    docker,cloudphysics,web] [--json]

Placement, eviction, repair and drains are the product's own (infinicache.table); what is modelled
is time: a joiner is there after 5 s, repair and drains take as long as the bytes they move, a lost
or evicted object is put again by the next get (a miss). The nodes come and go as on Summit
(../shared/data/summit_idle_week1.csv.gz, from its second day on); the pool takes idle nodes, the
first that come, up to its limit. Preemption is with 30 s of notice, or without notice for one in
ten or for all; and for comparison never. Requests: two real traces (../shared/data/cache_trace/),
and a synthetic one like a registry of container images: log-uniform sizes over nine orders of
magnitude with 20 % above 10 MB, Zipf popularity.

The check of the availability model: at every loss without notice the hypergeometric formula says
how many objects should be lost; the sum over the trace stands beside how many were. It takes the
nodes that are lost for random ones, which those of a real machine are not.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import heapq
import itertools
import json
import math
import random
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Shown

from scavenger.trace import files
from scavenger.trace import trace as traces

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
sys.path.insert(0, str(ROOT / "jobscripts" / "infinicache"))

from infinicache.availability import PoolChange, expected_losses, loss_probability, monte_carlo  # noqa: E402
from infinicache.codec import STRIPE_BYTES, Code, code_for  # noqa: E402
from infinicache.objects import TooLarge, Unavailable  # noqa: E402
from infinicache.table import Table  # noqa: E402

START_S = 86400.0
JOIN_S, GRACE_S, SETTLE_S = 5.0, 30.0, 1.0
MOVE_BYTES_S, NODE_BYTES_S = 200e6, 1e9
"""Repair of the pool (the product's default), and what one node can hand over."""
PREEMPTION = ("never", "30 s of notice", "1 in 10 without", "all without", "random nodes, without")
"""How nodes are taken. ``never``: the best that this memory could do. ``random nodes``: as many as
in the trace at the same times, but others, as the hypergeometric model has it.
"""
SUDDEN = {"1 in 10 without": 0.1, "all without": 1.0, "random nodes, without": 1.0}


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


REQUESTS = {"docker": docker, "cloudphysics": cloudphysics, "web": web}


@dataclass
class Replay:
    """One pool through one trace."""

    memory: int
    limit: int
    preemption: str
    rng: random.Random = field(default_factory=lambda: random.Random(11))

    def __post_init__(self) -> None:
        self.table = Table(self.rng)
        self.idle: dict[str, float] = {}
        self.now = 0.0
        self.allowance = 0.0
        self.repairs: deque[str] = deque()
        self.counts: dict[str, float] = dict.fromkeys(
            (
                "gets",
                "hits",
                "bytes",
                "hit_bytes",
                "refused",
                "repair_bytes",
                "drain_bytes",
                "expected",
                "losses",
                "notices",
            ),
            0.0,
        )
        self.capacity_s = self.used_s = 0.0
        self.changes: list[PoolChange] = []

    def advance(self, now: float) -> None:
        """Time passes: memory is lent, repairs go on."""
        dt = now - self.now
        self.capacity_s += dt * len(self.table.nodes) * self.memory
        self.used_s += dt * sum(n.reserved for n in self.table.nodes.values())
        self.now = now
        self.allowance = (
            min(self.allowance + dt * MOVE_BYTES_S, 60 * MOVE_BYTES_S) if self.repairs else 0.0
        )
        while self.repairs and self.allowance > 0:
            entry = self.table.objects.get(self.repairs.popleft())
            for move in self.table.repair(entry) if entry is not None else []:
                assert entry is not None
                self.table.set_chunk(entry, move.index, move.target)
                moved = move.bytes * (1 if move.source else entry.shape.d)
                self.counts["repair_bytes"] += moved
                self.allowance -= moved

    def fill(self) -> None:
        """Idle nodes that are up join, up to the limit."""
        joined = []
        for node, since in sorted(self.idle.items(), key=lambda item: item[1]):
            if len(self.table.nodes) >= self.limit or since + JOIN_S > self.now:
                break
            if node not in self.table.nodes:
                self.table.add_node(node, self.memory)
                joined.append(node)
        if joined:
            self.changes.append(PoolChange(self.now, joined=tuple(joined)))
            degraded = [e for e in self.table.objects.values() if e.protection < e.shape.p]
            self.repairs = deque(e.key for e in sorted(degraded, key=lambda e: e.protection))

    def take(self, nodes: list[str]) -> None:
        """These nodes are busy from now on; those with notice have handed over what the time
        allowed.
        """
        if self.preemption == "never" and self.table.nodes:
            return
        mine = [n for n in nodes if n in self.table.nodes]
        if self.preemption.startswith("random"):
            mine = self.rng.sample(sorted(self.table.nodes), len(mine))
            nodes = [*(n for n in nodes if n not in self.table.nodes), *mine]
        for node in nodes:
            self.idle.pop(node, None)
        sudden = [n for n in mine if self.rng.random() < SUDDEN.get(self.preemption, 0.0)]
        for node in mine:
            if node in sudden:
                continue
            self.counts["notices"] += 1
            self.table.nodes[node].leaving = True
        for node in mine:
            if node not in sudden:
                self.drain(node)
        if sudden:
            self.counts["losses"] += len(sudden)
            objects = [(len(set(e.at.values())), e.protection) for e in self.table.objects.values()]
            self.counts["expected"] += (
                expected_losses(objects, len(self.table.nodes), len(sudden)) if objects else 0.0
            )
            self.changes.append(PoolChange(self.now, lost=tuple(sudden)))
        for node in sudden:
            degraded, _ = self.table.lose_node(node)
            self.repairs.extend(e.key for e in degraded)

    def drain(self, node: str) -> None:
        """Hand over within the grace time; the rest is lost with the node."""
        left = GRACE_S * NODE_BYTES_S
        for move in self.table.drain(node):
            if move.bytes > left:
                break
            left -= move.bytes
            self.table.set_chunk(self.table.objects[move.key], move.index, None)
            self.table.set_chunk(self.table.objects[move.key], move.index, move.target)
            self.counts["drain_bytes"] += move.bytes
        degraded, _ = self.table.lose_node(node)
        self.repairs.extend(e.key for e in degraded)

    def request(self, request: Request) -> None:
        """A client's request."""
        entry = self.table.objects.get(request.key)
        if not request.put:
            self.counts["gets"] += 1
            self.counts["bytes"] += request.size
            if entry is not None and entry.shape.size == request.size:
                self.counts["hits"] += 1
                self.counts["hit_bytes"] += request.size
                self.table.touch(entry)
                return
        self.table.remove(request.key)
        try:
            made = self.table.begin(
                request.key,
                request.size,
                code_for(request.size),
                STRIPE_BYTES,
                self.table.newest + 1,
                [],
            )
            made.committed = True
        except (TooLarge, Unavailable):
            self.counts["refused"] += 1


def run(
    requests: list[Request],
    idle: traces.Trace,
    seconds: float,
    memory: int,
    limit: int,
    preemption: str,
) -> tuple[Replay, dict[str, Any]]:
    """Replay; what came of it."""
    replay = Replay(memory, limit, preemption)
    events: list[tuple[float, int, Any]] = [(r.time, 1, r) for r in requests]
    node_events: list[tuple[float, int, Any]] = []
    pending: list[str] = []
    opened = 0.0
    for batch in idle.batches():
        at = batch.time - START_S
        if at > seconds:
            break
        if at < 0:
            for i in batch.busy:
                replay.idle.pop(idle.names[i], None)
            replay.idle.update((idle.names[i], at) for i in batch.idle)
            continue
        if len(batch.idle):
            node_events.append((at, 0, ("idle", [idle.names[i] for i in batch.idle])))
        if len(batch.busy):
            if pending and at - opened > SETTLE_S:
                node_events.append((opened + SETTLE_S, 0, ("busy", pending)))
                pending = []
            opened = opened if pending else at
            pending = pending + [idle.names[i] for i in batch.busy]
    node_events.sort(key=lambda e: e[0])
    looks = [(float(t), 2, None) for t in range(0, int(seconds), 10)]
    for time_s, kind, what in heapq.merge(node_events, events, looks, key=lambda e: (e[0], e[1])):
        replay.advance(time_s)
        if kind == 1:
            replay.request(what)
        elif kind == 0 and what[0] == "busy":
            replay.take(what[1])
        elif kind == 0:
            for node in what[1]:
                replay.idle.setdefault(node, time_s)
        else:
            replay.fill()
    replay.advance(seconds)
    c, t = replay.counts, replay.table
    return replay, {
        "gets": int(c["gets"]),
        "hit_ratio": c["hits"] / max(1, c["gets"]),
        "byte_hit_ratio": c["hit_bytes"] / max(1, c["bytes"]),
        "lost_objects": t.lost,
        "evicted": t.evicted,
        "refused": int(c["refused"]),
        "expected_lost": c["expected"],
        "nodes_lost": int(c["losses"]),
        "nodes_drained": int(c["notices"]),
        "repair_gb": c["repair_bytes"] / 1e9,
        "drain_gb": c["drain_bytes"] / 1e9,
        "lent_gb_h": replay.capacity_s / 3600e9,
        "used_gb_h": replay.used_s / 3600e9,
    }


def main() -> None:
    """Replay, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--nodes", type=int, default=32, help="the most the pool takes")
    parser.add_argument("--memory-gb", type=float, default=8.0, help="lent by each node")
    parser.add_argument("--requests", default=",".join(REQUESTS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    idle = files.read(SHARED / "summit_idle_week1.csv.gz")
    rows = []
    sure: list[PoolChange] = []
    for name in options.requests.split(","):
        seconds = (
            min(options.hours * 3600, 7200.0) if name == "cloudphysics" else options.hours * 3600
        )
        requests = REQUESTS[name](seconds)
        for preemption in PREEMPTION:
            replay, found = run(
                requests, idle, seconds, int(options.memory_gb * 1e9), options.nodes, preemption
            )
            rows.append({"requests": name, "preemption": preemption, **found})
            if preemption == "all without" and name != "cloudphysics":
                sure = replay.changes
    model = []
    for code in (Code(10, 0), Code(10, 1), Code(10, 2), Code(4, 2), Code(20, 4)):
        rng = random.Random(3)
        share = error = math.nan
        if sure:
            share, error = monte_carlo(
                sure, code.n, code.p, life_s=3600.0, repair_s=10.0, trials=2000, rng=rng
            )
        once = {
            f"{r} gone": loss_probability(options.nodes, code.n, code.p, r)
            for r in (1, 2, 4, 8)
            if code.n <= options.nodes
        }
        model.append({"code": str(code), **once, "lost in 1 h": share, "+-": error})
    if options.json:
        print(json.dumps({"options": vars(options), "replay": rows, "model": model}, indent=1))
        return
    console = Console(width=200)
    what = f"replay: {options.hours:g} h, at most {options.nodes} nodes of {options.memory_gb:g} GB"
    for title, part in ((what, rows), ("model", model)):
        shown = Shown(title=title)
        for column in part[0]:
            shown.add_column(column, justify="right", overflow="fold")
        for row in part:
            shown.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
        console.print(shown)


if __name__ == "__main__":
    main()
