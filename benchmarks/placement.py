"""Measures the benefit of horizons and topology groups for placement, on a trace.

    python -m benchmarks.placement --trace summit_idle_week1.csv.gz [--nodes N] [--hours H]
        [--jobs J] [--seeds S] [--json]

Jobs of one curve, 1:64 nodes, never finish; at every event of the trace sizes are solved for and
nodes chosen. The rows differ in the information for placement:

* ``nothing``;
* ``horizons known``: the true end of each gap (an upper bound for forecasts);
* ``horizons estimated``: the expected remaining time by the age of the gap
  (:mod:`scavenger.horizon`, learnt meanwhile);
* ``groups``: the cabinet, which is the first three characters of the node's name;
* ``groups, estimated`` and ``groups, known``: both.

Columns: job preemptions (a job that loses several nodes at once counts once), nodes lost, groups
per job (mean over time and jobs), each also relative to ``nothing``; and milliseconds of processor
time per placement.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from allocator import NodeInfo, ScalingCurve, make_bid, place, solve
from scavenger.horizon import SurvivalEstimator
from scavenger.trace import files
from scavenger.trace import trace as traces

CURVE = ScalingCurve.of(
    {1: 1000.0, 2: 1950.0, 4: 3800.0, 8: 7300.0, 16: 13800.0, 32: 25000.0, 64: 42000.0}
)
MODES = (
    "nothing",
    "horizons known",
    "horizons estimated",
    "groups",
    "groups, estimated",
    "groups, known",
)


def replay(trace: traces.Trace, jobs: int, mode: str) -> dict[str, float]:
    """Make one pass over the trace."""
    gaps = trace.gaps()
    ends = {
        (int(n), float(start)): float(end)
        for n, start, end in zip(gaps.node, gaps.start, gaps.end, strict=True)
    }
    estimator = SurvivalEstimator()
    since: dict[int, float] = {}
    current: dict[str, tuple[str, ...]] = {f"j{j:02}": () for j in range(jobs)}
    hits = lost_nodes = events = 0
    spread = spread_time = cpu = last = 0.0
    for batch in trace.batches():
        crowd = [len({name[:3] for name in has}) for has in current.values() if has]
        spread += (batch.time - last) * sum(crowd)
        spread_time += (batch.time - last) * len(crowd)
        last = batch.time
        for n in batch.busy.tolist():
            if n in since:
                estimator.observe(batch.time - since.pop(n))
        gone = {trace.names[n] for n in batch.busy.tolist()}
        for job, has in current.items():
            lost = gone.intersection(has)
            hits += bool(lost)
            lost_nodes += len(lost)
            current[job] = tuple(name for name in has if name not in lost)
        since.update(dict.fromkeys(batch.idle.tolist(), batch.time))
        ages: dict[float, float] = {}
        nodes: dict[str, NodeInfo] = {}
        for n, began in since.items():
            horizon = None
            if "known" in mode:
                horizon = ends[n, began] - batch.time
            elif "estimated" in mode:
                if began not in ages:
                    ages[began] = estimator.expected_remaining(batch.time - began)
                horizon = ages[began]
            name = trace.names[n]
            nodes[name] = NodeInfo(
                "default", horizon_s=horizon, group=name[:3] if "groups" in mode else None
            )
        bids = [
            make_bid(job, CURVE, current=len(has), max_nodes=64) for job, has in current.items()
        ]
        sizes = solve(bids, {"default": len(nodes)}).sizes
        began_cpu = time.process_time()
        plan = place(sizes, current, nodes)
        cpu += time.process_time() - began_cpu
        events += 1
        current = {job: plan.get(job, ()) for job in current}
    return {
        "preemptions": hits,
        "lost_nodes": lost_nodes,
        "groups_per_job": spread / max(spread_time, 1e-9),
        "place_ms": 1e3 * cpu / max(events, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trace", type=Path, required=True, help="CSV of time_s, node, event (.gz allowed)"
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=1024,
        help="number of the trace's nodes to use, drawn at random",
    )
    parser.add_argument("--hours", type=float, default=48.0)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line instead of a table"
    )
    args = parser.parse_args()
    whole = files.read(args.trace).window(0.0, 3600.0 * args.hours)
    samples = [whole.sample(min(args.nodes, len(whole.names)), seed) for seed in range(args.seeds)]
    base: dict[str, list[float]] = {}
    for mode in MODES:
        results = [replay(sample, args.jobs, mode) for sample in samples]
        measured: dict[str, object] = {
            "told": mode,
            "nodes": args.nodes,
            "hours": args.hours,
            "jobs": args.jobs,
            "seeds": args.seeds,
        }
        for key in ("preemptions", "lost_nodes", "groups_per_job"):
            mine = [one[key] for one in results]
            base.setdefault(key, mine)
            ratios = [a / b for a, b in zip(mine, base[key], strict=True) if b]
            measured[key] = round(statistics.fmean(mine), 3)
            measured[f"{key}_ratio"] = round(statistics.fmean(ratios), 4) if ratios else None
            measured[f"{key}_ratio_spread"] = (
                round(max(ratios) - min(ratios), 4) if ratios else None
            )
        measured["place_ms"] = round(statistics.fmean(one["place_ms"] for one in results), 3)
        if args.json:
            print(json.dumps(measured), flush=True)
        else:
            print(
                f"{mode:20}  preemptions {measured['preemptions']:>8} "
                f"({measured['preemptions_ratio']})  lost nodes "
                f"{measured['lost_nodes']:>9} ({measured['lost_nodes_ratio']})  groups a job "
                f"{measured['groups_per_job']:>6} "
                f"({measured['groups_per_job_ratio']})  {measured['place_ms']} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
