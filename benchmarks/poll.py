"""Measures what one poll of a batch scheduler costs MalleTrain, in wall time and in processor time
(for a machine that is busy otherwise). The common part of :mod:`benchmarks.slurm_poll` and
:mod:`benchmarks.pbs_poll`, which make the scheduler's answers.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from scavenger.batch.scavenger import BatchScavenger

NOW = 1_800_000_000.0
REPEATS = 15
Row = dict[str, Any]


def milliseconds(action: Callable[[], object]) -> tuple[float, float]:
    """Return the medians of (wall, processor) time of an action."""
    wall, cpu = [], []
    for _ in range(REPEATS):
        began, cpu_began = time.perf_counter(), time.process_time()
        action()
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - cpu_began)
    return 1000 * statistics.median(wall), 1000 * statistics.median(cpu)


def measure(
    scavenger: BatchScavenger[Any, Any], site: object, reads: Mapping[str, Callable[[], object]]
) -> Row:
    """Return the milliseconds of each of ``reads``, of a whole poll, and of explaining every node.
    ``site``: the configuration, which is not requested.
    """
    scavenger.site, scavenger.site_every_s = site, math.inf
    snapshot = scavenger.poll()
    actions = {**reads, "poll": scavenger.poll, "explain all": lambda: list(snapshot.explanations)}
    counts = {"gaps": len(snapshot.gaps), "leases": len(snapshot.leases)}
    return {**counts, "ms": {name: milliseconds(action) for name, action in actions.items()}}


def main(about: str, measure_one: Callable[[int, int], Row]) -> None:
    """Print a table, or JSON with --json. ``measure_one``: measures with a number of nodes, and a
    number of waiting jobs and of running ones.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="*", default=[1000, 4600, 10_000])
    parser.add_argument(
        "--jobs", type=int, default=5000, help="waiting jobs, and as many running ones"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [
        {"nodes": nodes, "jobs": 2 * args.jobs, **measure_one(nodes, args.jobs)}
        for nodes in args.nodes
    ]
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print(
        f"{'nodes':>7} {'jobs':>7} {'MB':>6}"
        + "".join(f"{name + ' wall/cpu ms':>26}" for name in rows[0]["ms"])
    )
    for row in rows:
        times = "".join(f"{wall:19.1f}/{cpu:6.1f}" for wall, cpu in row["ms"].values())
        print(f"{row['nodes']:7d} {row['jobs']:7d} {row['mb']:6.1f}{times}")
