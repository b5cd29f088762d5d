"""Measures the duration of one allocation, and whether its plan is optimal.

    python -m benchmarks.allocation --nodes 10624 --jobs 500 --max-size 512 --repeats 200
        [--curves FILE] [--json]

Each repeat is a random problem (:mod:`benchmarks.instances`; the kinds take turns): jobs with their
curves and the nodes on which they run. Measured are making the bids, solving for sizes (gap 0), and
choosing the nodes. ``median_ms`` and ``worst_ms`` are wall time over the repeats; ``cpu_median_ms``
is processor time, which other work on the machine hardly changes; ``gap`` is the largest remaining
gap; ``load`` is the load average before and after. ``objective`` and ``oracle_objective`` are means
over the first ``--oracle`` repeats, the latter of :mod:`tests.allocator.oracles.dp`. With
``--json``, each row is a JSON object on a line.

    python -m benchmarks.allocation --nodewise [--time-limit 60] [--json]

compares with FreeTrain's model (:mod:`tests.allocator.oracles.nodewise`, the corrected form) on
growing machines until that exceeds the time limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from allocator import Allocation, Bid, NodeInfo, ScalingCurve, place, solve
from benchmarks.instances import KINDS, Instance, capacity, instance, read_curves
from tests.allocator.oracles import dp
from tests.allocator.oracles.nodewise import NodewiseJob
from tests.allocator.oracles.nodewise import solve as nodewise

LADDER = (
    (8, 2),
    (16, 4),
    (32, 4),
    (64, 8),
    (128, 8),
    (128, 16),
    (256, 16),
    (256, 32),
    (512, 32),
    (512, 64),
    (1024, 64),
    (2048, 128),
    (4096, 256),
)
"""(nodes, jobs) of the comparison with the node-by-node model."""


def event(
    problem: Instance,
    current: dict[str, tuple[str, ...]],
    nodes: dict[str, NodeInfo],
    *,
    dynamic_program: bool,
    time_limit_s: float,
) -> tuple[Allocation, dict[str, tuple[str, ...]], list[Bid]]:
    """Compute bids, sizes and nodes: the whole cost of one event."""
    bids = [problem.bid(job, on) for job, on in current.items()]
    allocation = solve(
        bids,
        capacity(nodes),
        clock=time.perf_counter,
        dynamic_program=dynamic_program,
        time_limit_s=time_limit_s,
    )
    return allocation, place(allocation.sizes, current, nodes), bids


def measure(
    nodes: int,
    jobs: int,
    max_size: int,
    *,
    repeats: int,
    kinds: Sequence[str],
    curves: Sequence[ScalingCurve],
    oracle: int,
    classes: int,
    dynamic_program: bool,
    time_limit_s: float,
) -> dict[str, object]:
    """Return one row."""
    wall, cpu, gaps, proofs = [], [], [], []
    objectives, oracles = [], []
    before = os.getloadavg()[0]
    for seed in range(repeats):
        problem = instance(seed, nodes, jobs, max_size, kinds[seed % len(kinds)], curves, classes)
        began, began_cpu = time.perf_counter(), time.process_time()
        allocation, _, bids = event(
            problem,
            problem.current,
            problem.nodes,
            dynamic_program=dynamic_program,
            time_limit_s=time_limit_s,
        )
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - began_cpu)
        gaps.append(allocation.gap)
        proofs.append(allocation.proof)
        if seed < oracle:
            objectives.append(allocation.objective)
            oracles.append(dp.solve(bids, capacity(problem.nodes)).objective)
    return {
        "nodes": nodes,
        "jobs": jobs,
        "max_size": max_size,
        "median_ms": _ms(statistics.median(wall)),
        "worst_ms": _ms(max(wall)),
        "gap": max(gaps),
        "objective": statistics.fmean(objectives) if objectives else None,
        "oracle_objective": statistics.fmean(oracles) if oracles else None,
        "worst_difference": max(
            (abs(a - b) / abs(b) for a, b in zip(objectives, oracles, strict=True)), default=None
        ),
        "oracle_checked": len(oracles),
        "cpu_median_ms": _ms(statistics.median(cpu)),
        "cpu_worst_ms": _ms(max(cpu)),
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "proofs": {proof: proofs.count(proof) for proof in sorted(set(proofs))},
        "classes": classes,
        "time_limit_s": time_limit_s,
        "unproven": sum(gap > 0 for gap in gaps),
        "kinds": list(kinds),
        "repeats": repeats,
        "solver": "dp+highs" if dynamic_program else "highs",
    }


def compare(nodes: int, jobs: int, *, seed: int, time_limit_s: float) -> dict[str, object]:
    """Return one row of the comparison with the node-by-node model; up to 64 nodes per job."""
    largest = min(64, nodes)
    problem = instance(seed, nodes, jobs, largest, "measured")
    began = time.perf_counter()
    allocation, _, _ = event(
        problem, problem.current, problem.nodes, dynamic_program=True, time_limit_s=time_limit_s
    )
    ours = time.perf_counter() - began
    began = time.perf_counter()
    reference = nodewise(
        [
            NodewiseJob(job, problem.curves[job]["default"], 1, largest, on)
            for job, on in problem.current.items()
        ],
        list(problem.nodes),
        time_limit_s=time_limit_s,
    ).allocation
    theirs = time.perf_counter() - began
    return {
        "nodes": nodes,
        "jobs": jobs,
        "max_size": largest,
        "ours_ms": _ms(ours),
        "nodewise_ms": _ms(theirs),
        "ratio": round(theirs / ours, 1),
        "nodewise_status": reference.status,
        "nodewise_gap": reference.gap,
        "objective": allocation.objective,
        "nodewise_objective": reference.objective,
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def _show(row: dict[str, object], as_json: bool, columns: Sequence[str], first: bool) -> None:
    if as_json:
        print(json.dumps(row), flush=True)
        return
    if first:
        print("  ".join(f"{name:>16}" for name in columns))
    cells = (row[name] for name in columns)
    print(
        "  ".join(
            f"{cell:>16.6g}" if isinstance(cell, float) else f"{cell!s:>16}" for cell in cells
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=10624)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument(
        "--max-size", type=int, default=64, help="largest size of every job; the smallest is 1"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--curves", type=Path, help="draw curves from this CSV file (model, nodes, samples_per_s)"
    )
    parser.add_argument(
        "--kind",
        choices=KINDS,
        action="append",
        help="only these kinds of jobs (default: all in turn)",
    )
    parser.add_argument(
        "--classes", type=int, default=1, help="classes of nodes (the oracle supports only one)"
    )
    parser.add_argument(
        "--oracle", type=int, default=20, help="repeats checked with the dynamic program"
    )
    parser.add_argument(
        "--highs-only",
        action="store_true",
        help="solve every reduced problem with HiGHS, none with the dynamic program",
    )
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds a solve may take")
    parser.add_argument(
        "--nodewise",
        action="store_true",
        help="compare with FreeTrain's node-by-node model instead",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line instead of a table"
    )
    args = parser.parse_args()
    if args.nodewise:
        columns: tuple[str, ...] = (
            "nodes",
            "jobs",
            "ours_ms",
            "nodewise_ms",
            "ratio",
            "nodewise_status",
            "objective",
            "nodewise_objective",
        )
        for rung, (nodes, jobs) in enumerate(LADDER):
            row = compare(nodes, jobs, seed=rung, time_limit_s=args.time_limit)
            _show(row, args.json, columns, rung == 0)
            if row["nodewise_status"] != "optimal":
                break
        return
    curves = read_curves(args.curves) if args.curves else []
    longest = max((curve.largest for curve in curves), default=args.max_size)
    if longest < args.max_size:
        print(
            f"The curves end at {longest} nodes; larger sizes are valued at their last throughput.",
            file=sys.stderr,
        )
    row = measure(
        args.nodes,
        args.jobs,
        args.max_size,
        repeats=args.repeats,
        kinds=("file",) if curves else tuple(args.kind or KINDS),
        curves=curves,
        oracle=args.oracle if args.classes == 1 else 0,
        classes=args.classes,
        dynamic_program=not args.highs_only,
        time_limit_s=args.time_limit,
    )
    columns = (
        "nodes",
        "jobs",
        "max_size",
        "median_ms",
        "worst_ms",
        "gap",
        "objective",
        "oracle_objective",
    )
    _show(row, args.json, columns, True)


if __name__ == "__main__":
    main()
