"""How long jobs queue, and when they are done, by how they begin and grow.

    python -m benchmarks.start --data ../shared/data [--world dedicated:kth] [--seeds 3] [--json]

The policies (``malletrain simulate --policy``): MalleTrain's work-conserving start, where a job
begins on what there is; ``gang``, where it waits for all its nodes; ``doubling`` and ``additive``,
where it begins on one node and its maximum doubles, or grows by one node, every ten minutes.

Each row is one machine, jobs of one log (arrivals, sizes and run times of batch jobs, as training
jobs on 1 to so many nodes with the curves measured on Summit), a load, and a seed, which is another
stretch of the log. ``dedicated`` is a machine whose nodes are always there, so many that the jobs
need ``--load`` of them. ``kth`` is the nodes that the jobs of KTH leave idle; jobs are drawn so
that their work is ``--load`` of what the idle nodes could do at best. A job of ``gang`` that loses
a node there waits again for all its nodes and resumes from its snapshot.

``queued``: mean time from submission to the first start; ``without_nodes``: mean time without nodes
from submission to the end, which also counts later waits; ``completion``: mean time from submission
to the end; hours. Jobs that have not ended when the simulation ends count until then
(``unfinished``). ``over_gang`` is ``queued`` over that of ``gang`` in the same row's machine, jobs,
load and seed (target for ``malletrain``: 0.4), ``over_additive`` is ``completion`` over that of
``additive``. Each row is printed on standard error when it is done.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import deadlines
from malletrain.sim.engine import Simulation
from malletrain.sim.model_jobs import SimRun
from malletrain.sim.policies import POLICIES
from malletrain.sim.settings import SimSettings
from malletrain.sim.workload_files import read_curves
from malletrain.sim.workloads import SimJob, arriving, hpo
from scavenger.trace.trace import Trace

DAY_S = 86400.0
TARGET = 0.4
STARTS = ("malletrain", "gang", "doubling", "additive")
MAX_RUNNING = 128
"""Maximum number of jobs that run at a time."""
DRAIN_S = 3 * DAY_S
"""Time after the last submission in which jobs of a dedicated machine can end."""
WORLDS = ("dedicated:kth", "kth:kth", "kth:philly")


@dataclass(frozen=True)
class Case:
    """One simulation."""

    machine: str
    jobs: str
    load: float
    seed: int
    days: float
    policy: str


def dedicated(case: Case, data: Path) -> tuple[Trace, list[SimJob]]:
    """Return a machine whose nodes are always there, and all jobs of a stretch of the log."""
    log = deadlines.log_of(case.jobs, data)
    fit = [j for j in log.jobs if j.run_s and j.nodes <= 64]
    begin = fit[len(fit) // 3].submit_s + case.seed * 10 * DAY_S
    span_s = case.days * DAY_S
    arrivals = [
        (j.submit_s - begin, j.nodes, j.run_s or 0.0)
        for j in fit
        if begin <= j.submit_s < begin + span_s
    ]
    node_s = sum(nodes * run_s for _, nodes, run_s in arrivals)
    nodes = max(int(np.ceil(node_s / span_s / case.load)), max(nodes for _, nodes, _ in arrivals))
    curves = read_curves(data / "dnn_scaling_summit.csv")
    jobs = arriving(hpo(curves, len(arrivals), case.seed, max_nodes=64), arrivals)
    end_s = span_s + DRAIN_S
    names = [f"n{k}" for k in range(nodes)]
    return Trace.from_gaps(range(nodes), [0.0] * nodes, [end_s] * nodes, names, end_s), jobs


def idle(case: Case, data: Path) -> tuple[Trace, list[SimJob]]:
    """Return the nodes that a machine's jobs left idle, and jobs drawn from a log."""
    drawn = deadlines.Case(case.machine, case.jobs, case.load, case.seed, case.days)
    trace = deadlines.trace_of(drawn, data)
    jobs = deadlines.jobs_of(drawn, trace, data)
    return trace, [replace(job, deadline_s=None) for job in jobs]


def figures(runs: list[SimRun], end_s: float) -> dict[str, Any]:
    """Return the mean times of the jobs, hours.

    Args:
        runs: all jobs.
        end_s: end of the simulation, seconds.
    """
    queued, without, completion = [], [], []
    for run in runs:
        submit_s = run.job.submit_s
        ended_at = end_s if run.ended_at is None else run.ended_at
        queued.append((end_s if run.first_start is None else run.first_start) - submit_s)
        without.append(ended_at - submit_s - run.allocated_s)
        completion.append(ended_at - submit_s)
    return {
        "count": len(runs),
        "unfinished": sum(run.ended_at is None for run in runs),
        "queued": statistics.fmean(queued) / 3600.0,
        "queued_p95": float(np.percentile(queued, 95)) / 3600.0,
        "without_nodes": statistics.fmean(without) / 3600.0,
        "completion": statistics.fmean(completion) / 3600.0,
    }


def row(case: Case, data: Path) -> dict[str, Any]:
    """One row of the table."""
    trace, jobs = (dedicated if case.machine == "dedicated" else idle)(case, data)
    settings = SimSettings(POLICIES[case.policy], max_running=MAX_RUNNING)
    simulation = Simulation(trace, jobs, settings)
    simulation.run()
    submitted = [run for run in simulation.runs.values() if run.job.submit_s < simulation.now]
    times = figures(submitted, simulation.now)
    return {**asdict(case), "nodes": len(trace.names), **times}


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the ratios to ``gang`` and ``additive`` of the same world."""
    by_world = {(_world(r), r["policy"]): r for r in rows}
    result = []
    for r in rows:
        gang, additive = by_world[_world(r), "gang"], by_world[_world(r), "additive"]
        result.append(
            {
                **r,
                "over_gang": r["queued"] / gang["queued"] if gang["queued"] else None,
                "without_over_gang": r["without_nodes"] / gang["without_nodes"]
                if gang["without_nodes"]
                else None,
                "over_additive": r["completion"] / additive["completion"],
            }
        )
    return result


def _world(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the common properties of the rows of one comparison."""
    return row["machine"], row["jobs"], row["load"], row["seed"]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each machine, log, load and policy: means over the seeds, and the smallest
    and largest ratio.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in rows:
        groups.setdefault((r["machine"], r["jobs"], r["load"], r["policy"]), []).append(r)
    result = []
    for (machine, jobs, load, policy), group in groups.items():
        one = {"machine": machine, "jobs": jobs, "load": load, "policy": policy}
        one["count"] = sum(r["count"] for r in group)
        one["unfinished"] = sum(r["unfinished"] for r in group)
        for key in ("queued", "without_nodes", "completion"):
            one[key] = round(statistics.fmean(r[key] for r in group), 3)
        for key in ("over_gang", "without_over_gang", "over_additive"):
            ratios = [r[key] for r in group if r[key] is not None]
            one[key] = [round(f(ratios), 3) for f in (statistics.fmean, min, max)] if ratios else []
        result.append(one)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the logs and curves")
    parser.add_argument("--world", action="append", help=f"default: {' '.join(WORLDS)}")
    parser.add_argument("--load", type=float, action="append", help="default: 0.7")
    parser.add_argument("--seeds", type=int, default=3, help="stretches of the log")
    parser.add_argument("--days", type=float, default=6.0, help="days of submissions")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()
    cases = [
        Case(machine, jobs, load, seed, args.days, policy)
        for machine, jobs in (world.split(":") for world in args.world or WORLDS)
        for load in args.load or (0.7,)
        for seed in range(args.seeds)
        for policy in STARTS
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=context) as pool:
        waiting = [pool.submit(row, case, args.data) for case in cases]
        rows = []
        for each in waiting:
            rows.append(each.result())
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    rows = compared(rows)
    means = summary(rows)
    if args.json:
        about = {"target": TARGET, "cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
        print(json.dumps({"benchmark": "start", **about, "summary": means, "rows": rows}))
        return
    print("  ".join(f"{name:>17}" for name in means[0]))
    for one in means:
        print("  ".join(f"{_cell(value):>17}" for value in one.values()))


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return f"{value[0]} ({value[1]}-{value[2]})" if value else "-"
    return str(value)


if __name__ == "__main__":
    main()
