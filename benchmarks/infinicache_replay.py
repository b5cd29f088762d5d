"""The cache on real idle nodes: requests of a trace against a pool that follows the idle nodes of
another one.

    python -m benchmarks.infinicache_replay [--days 1,4] [--hours 24] [--nodes 32] [--memory-gb 8]
    [--idle FILE] [--requests docker,cloudphysics,web] [--traces FOLDER] [--ways …]
    [--preemption …] [--reserved 2,4,8] [--json]

Each row is told on the standard error stream as soon as it is there.

What is decided by the product's own code and what is modelled is said in
:mod:`benchmarks.infinicache_pool`. The nodes come and go as on Summit
(``--idle``, by default ../shared/data/summit_idle_week1.csv.gz, from the beginning of each of the
days, counted from 0); the pool takes idle nodes, those idle longest first, up to its limit.
Preemption is with 30 s of notice, or without notice for one in ten or for all; and for comparison
never.

Ways to run the cache, one change each: with chunks on random nodes; with room made for
leavers; with chunks on nodes that lasted, or (what could be had at best) that do last; with
backups; with a reserve.

``--reserved``: that many nodes that are never taken and need no parity. They show what a node-hour
of idle nodes is worth compared with a reserved one, and what the sample of the keys predicts for as
much memory.

The check of the availability model: at every loss without notice the hypergeometric formula says
how many objects should be lost; the sum over the trace stands beside how many were. It takes the
nodes that are lost for random ones, which those of a real machine are not. ``model``: what the
formula says of an hour by the measured numbers of nodes lost at once, without and with backups, and
a Monte Carlo over the losses as they were, for objects that wait for repair meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Shown

from benchmarks import needs
from benchmarks.infinicache_pool import SUDDEN, Way, replay
from benchmarks.infinicache_requests import (
    CACHE_TRACES,
    REQUESTS,
    SHARED,
    Request,
    trace_file,
)
from scavenger.trace import files

from infinicache.availability import PoolChange, lost_within, monte_carlo  # isort: skip
from infinicache.codec import Code  # isort: skip
from infinicache.demand import KeyDemand  # isort: skip

DAY_S = 86400.0
WAYS = (
    Way("at random", room=False),
    Way("room for leavers"),
    Way("apart", apart=True),
    Way("by age", apart=True, foresight="age"),
    Way("ends known", apart=True, foresight="known"),
    Way("by age, backups", apart=True, foresight="age", backup_s=10.0),
    Way("by age, reserve 0.2", apart=True, foresight="age", reserve=0.2),
)
CODES = (Code(10, 0), Code(10, 1), Code(10, 2), Code(4, 2), Code(20, 4))


def foretold(requests: list[Request], memory: float, sample: int) -> tuple[float, float]:
    """Return the predicted hits and bytes of hits, as shares of the requests, of ``memory`` bytes
    of objects without parity, from a sample of ``keys`` keys.
    """
    demand, seen = KeyDemand(sample, half_life_s=math.inf), set()
    for r in requests:
        demand.read(r.key, r.time, r.size if r.key in seen else 0)
        if r.key not in seen:
            seen.add(r.key)
            demand.write(r.key, r.size, r.size, r.time)
    span = requests[-1].time - requests[0].time
    hits, size = demand.curve(requests[-1].time).at(memory)
    return hits * span / len(requests), size * span / sum(r.size for r in requests)


def model(
    changes: list[PoolChange], losses: list[tuple[int, int]], seconds: float
) -> list[dict[str, Any]]:
    """Return the probability that an object is lost within an hour of its put, by its code."""
    rows = []
    for code in CODES:
        share, error = monte_carlo(
            changes,
            code.n,
            code.p,
            life_s=3600.0,
            repair_s=10.0,
            trials=2000,
            rng=random.Random(3),
        )
        result = {
            name: lost_within(losses, 3600.0 / seconds, code.n, code.p, copied)
            for name, copied in (("formula", 0.0), ("formula, backups", 1.0))
        }
        rows.append({"code": str(code), **result, "Monte Carlo": share, "+-": error})
    return rows


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--days", default="1")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--nodes", type=int, default=32, help="the most the pool takes")
    parser.add_argument("--memory-gb", type=float, default=8.0, help="lent by each node")
    parser.add_argument("--requests", default="docker")
    parser.add_argument("--ways", default=",".join(w.name.replace(",", ";") for w in WAYS))
    parser.add_argument("--preemption", default="30 s of notice;all without")
    parser.add_argument(
        "--reserved", default="", help="numbers of nodes of pools that are never taken"
    )
    parser.add_argument(
        "--idle",
        type=Path,
        default=SHARED / "summit_idle_week1.csv.gz",
        metavar="FILE",
        help="trace of idle nodes (CSV time_s,node,event; also .gz)",
    )
    parser.add_argument(
        "--traces",
        type=Path,
        default=SHARED / "cache_trace",
        metavar="FOLDER",
        help="traces of requests, for --requests cloudphysics and web",
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for name in options.requests.split(","):
        if name not in REQUESTS:
            parser.error(f"--requests {name!r} is none of {', '.join(REQUESTS)}")
        if name in CACHE_TRACES:
            needs.existing(
                trace_file(options.traces, name), "--traces FOLDER", "a trace of requests"
            )
    needs.existing(options.idle, "--idle FILE", "when nodes are idle")
    selection = [name.replace(";", ",") for name in options.ways.split(",")]
    ways = [w for w in WAYS if w.name in selection]
    idle = files.read(options.idle)
    memory = int(options.memory_gb * 1e9)
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)

    models: list[dict[str, Any]] = []
    load = os.getloadavg()[0]
    for name in options.requests.split(","):
        seconds = (
            min(options.hours * 3600, 7200.0) if name == "cloudphysics" else 3600 * options.hours
        )
        requests = REQUESTS[name](seconds, options.traces)
        for day in map(int, options.days.split(",")):
            span = (day * DAY_S, seconds)
            about = {"requests": name, "day": day}
            plain = Way("reserved", room=False, whole=True)
            for count in map(int, filter(None, options.reserved.split(","))):
                _, result = replay(requests, idle, span, (memory, count), "never", plain)
                note({**about, "way": f"{count} reserved", "preemption": "never", **result})
                for keys in (8192, 512):
                    hits, size = foretold(requests, memory * count, keys)
                    label = f"{count} foretold by {keys} keys"
                    ratios = {"hit_ratio": hits, "byte_hit_ratio": size}
                    note({**about, "way": label, "preemption": "never", **result, **ratios})
            for preemption in filter(None, options.preemption.split(";")):
                if preemption not in SUDDEN:
                    parser.error(f"{preemption!r} is no preemption; known are {'; '.join(SUDDEN)}")
                for way in ways:
                    made, result = replay(
                        requests, idle, span, (memory, options.nodes), preemption, way
                    )
                    note({**about, "way": way.name, "preemption": preemption, **result})
                    if preemption == "all without" and way is ways[0]:
                        of_day = model(made.changes, made.together, seconds)
                        models += [{**about, **row} for row in of_day]
    if options.json:
        about = {"options": vars(options), "load": [load, os.getloadavg()[0]]}
        print(json.dumps({**about, "replay": rows, "model": models}, indent=1, default=str))
        return
    console = Console(width=220)
    for title, part in (("replay", rows), ("model", models)):
        shown = Shown(title=title)
        for column in part[0] if part else ():
            shown.add_column(column, justify="right", overflow="fold")
        for row in part:
            shown.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
        console.print(shown)


if __name__ == "__main__":
    main()
