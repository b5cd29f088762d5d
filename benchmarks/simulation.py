"""How fast the simulator is on the full machine, and whether it agrees with an independent replay
of the same week.

    python -m benchmarks.simulation --trace week1.csv.gz --node-list nodes.txt --curves scaling.csv
    [--json]

Rows, each in a process of its own:

* ``speed``: all nodes, the whole trace, 1,000 jobs drawn from all curves, 20 at a time, each with
  work for longer than the trace leaves it, under ``real`` and under ``freetrain`` costs. Targets:
  60 s of wall time on two cores, 2 GiB of memory;
* ``agreement``: 1,024 nodes, ten jobs at a time of the curve ``shufflenet``, T_fwd 120 s, up 18 s,
  down 12 s, FreeTrain's costs, for three draws of the nodes. The published ratios to the upper
  bound are 0.979 (exact plans) and 0.879 (equal division).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

PUBLISHED = {"freetrain": 0.979, "malletrain": 0.979, "equal": 0.879}
TARGET_WALL_S, TARGET_GIB = 60.0, 2.0


def row(
    kind: str, policy: str, semantics: str, seed: int, files: dict[str, str], hours: float | None
) -> dict[str, Any]:
    """Return one simulation as a row of the table."""
    from malletrain.sim.engine import simulate
    from malletrain.sim.model_jobs import CostModel
    from malletrain.sim.policies import POLICIES
    from malletrain.sim.settings import SimSettings
    from malletrain.sim.workload_files import read_curves
    from malletrain.sim.workloads import hpo
    from scavenger.trace.files import read, read_names

    began = time.perf_counter()
    trace = read(
        files["trace"], names=read_names(files["node_list"]) if files["node_list"] else None
    )
    curves = read_curves(files["curves"])
    costs = CostModel("freetrain" if semantics == "freetrain" else "real", up_s=18.0, down_s=12.0)
    if kind == "agreement":
        trace = trace.sample(1024, seed)
        jobs = hpo({"shufflenet": curves["shufflenet"]}, 1500)
        settings = SimSettings(POLICIES[policy], costs, max_running=10, hours=hours)
    else:
        jobs = hpo(curves, 1000, seed, samples=4e8)
        settings = SimSettings(POLICIES[policy], costs, max_running=20, hours=hours)
    result = simulate(trace, jobs, settings)
    return {
        "kind": kind,
        "policy": policy,
        "costs": semantics,
        "seed": seed,
        "nodes": result.nodes,
        "hours": round(result.hours, 1),
        "plans": result.plans,
        "p95_decision_ms": round(result.p95_decision_ms, 2),
        "fraction_of_ideal": round(result.fraction_of_ideal, 4),
        "published": PUBLISHED[policy] if kind == "agreement" else None,
        "wall_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(time.process_time(), 1),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", required=True)
    parser.add_argument("--node-list")
    parser.add_argument("--curves", required=True)
    parser.add_argument("--hours", type=float, help="only the first hours of the trace")
    parser.add_argument("--seeds", type=int, default=3, help="draws of the nodes for the agreement")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    args = parser.parse_args()
    files = {"trace": args.trace, "node_list": args.node_list, "curves": args.curves}
    cases = [("speed", "malletrain", "real", 0), ("speed", "malletrain", "freetrain", 0)]
    cases += [
        ("agreement", policy, "freetrain", seed)
        for seed in range(args.seeds)
        for policy in PUBLISHED
    ]
    rows = []
    for case in cases:
        # a new process each, because peak memory is that of one case
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            rows.append(pool.submit(row, *case, files, args.hours).result())
        if not args.json:
            if len(rows) == 1:
                print("  ".join(f"{name:>17}" for name in rows[0]))
            print(
                "  ".join(
                    f"{value if value is not None else '-'!s:>17}" for value in rows[-1].values()
                ),
                flush=True,
            )
    if args.json:
        about = {
            "benchmark": "simulation",
            "cpus": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2),
        }
        print(
            json.dumps(
                {**about, "target_wall_s": TARGET_WALL_S, "target_gib": TARGET_GIB, "rows": rows}
            )
        )


if __name__ == "__main__":
    main()
