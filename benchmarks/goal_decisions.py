"""How long the controller's whole decision takes at full size, with goals and without.

    python -m benchmarks.goal_decisions [--nodes 10624] [--jobs 200] [--events 100] [--json]

The daemon's own controller holds all nodes and runs all jobs (1 to ``--max-size`` nodes, curves as
in :mod:`benchmarks.instances`, kind ``measured``). Events follow each other: a node goes, or comes
back, and time passes. A *decision* is the step that makes the plan: bids, sizes, names of nodes,
commands, and whatever of goals is looked at in it (reviews, forecasts, promises, charges).
``none``: no job has goals; ``mixed``: every second job has a deadline, every fourth a budget;
``all``: each job has both. There is a week of node history. ``cpu_*``: processor time, which other
work on the machine hardly changes. Target: 50 ms in the median for 10,624 nodes and 200 jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from functools import partial
from typing import Any

import numpy as np

from benchmarks.instances import random_curve
from malletrain.core.controller import Controller
from malletrain.core.events import JobSubmitted, NodeJoined, NodeLost, RescaleFinished, Tick
from malletrain.core.goals import NO_GOALS, OwnerGoals, WorkReported
from malletrain.core.node_history import SPAN_S, NodeSpan
from malletrain.core.planning import exact, make_plan
from malletrain.core.settings import ControllerSettings, PlanningSettings

HOUR_S = 3600.0
TARGET_MS = 50.0
KINDS = ("none", "mixed", "all")


def goals_of(kind: str, number: int, rate: float, rng: np.random.Generator) -> OwnerGoals:
    """What the owner of one job wants; ``rate``: samples/s on its largest size."""
    hours = float(rng.uniform(2.0, 24.0))
    work = rate * HOUR_S * hours * float(rng.uniform(0.1, 0.6))
    deadline = hours * HOUR_S if kind == "all" or (kind == "mixed" and number % 2 == 0) else None
    budget = 64 * hours * HOUR_S if kind == "all" or (kind == "mixed" and number % 4 == 1) else None
    return OwnerGoals(deadline, budget, work) if deadline or budget else NO_GOALS


def measure(kind: str, nodes: int, jobs: int, max_size: int, events: int) -> dict[str, Any]:
    """One row."""
    rng = np.random.default_rng(1)
    settings = ControllerSettings(
        PlanningSettings(max_running=jobs), min_interval_s=0.0, starvation_s=1e9
    )
    controller = Controller(
        settings, partial(make_plan, solver=partial(exact, clock=time.perf_counter))
    )
    spans = nodes * rng.uniform(0.3, 1.0, 2016)
    controller.goals.history.restore(
        NodeSpan(SPAN_S * (k - 2016), "default", float(n)) for k, n in enumerate(spans)
    )
    for number in range(jobs):
        curve = random_curve(rng, max_size, rough=False)
        goals = goals_of(kind, number, curve.at(max_size), rng)
        spec = JobSubmitted(f"j{number:04}", 1, max_size, curve=curve, goals=goals)
        controller.handle(spec, 0.0)
    controller.handle_all([NodeJoined(f"n{k:05}") for k in range(nodes)], 1.0)
    now, took, cpu = 5.0, [], []
    controller.handle(Tick(), now)
    for turn in range(events):
        now += 20.0
        name = f"n{int(rng.integers(nodes)):05}"
        gone = name in controller.nodes
        controller.handle(NodeLost(name) if gone else NodeJoined(name), now)
        running = [(n, job) for n, job in controller.jobs.items() if job.nodes]
        reports: list[Any] = [RescaleFinished(n) for n, job in running if job.rescaling]
        if turn % 5 == 0:
            reports += [WorkReported(n, 1e3 * turn) for n, _ in running]
        controller.handle_all(reports, now + 0.05)
        plans, began, busy = controller.plans, time.perf_counter(), time.process_time()
        controller.handle(Tick(), now + 10.0)
        if controller.plans != plans:
            took.append(1e3 * (time.perf_counter() - began))
            cpu.append(1e3 * (time.process_time() - busy))
    return {
        "goals": kind,
        "nodes": nodes,
        "jobs": jobs,
        "decisions": len(took),
        "median_ms": round(statistics.median(took), 1),
        "p95_ms": round(float(np.quantile(took, 0.95)), 1),
        "worst_ms": round(max(took), 1),
        "cpu_median_ms": round(statistics.median(cpu), 1),
        "cpu_p95_ms": round(float(np.quantile(cpu, 0.95)), 1),
        "promised": sum(r.promised for r in controller.goals.records.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=10624)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--max-size", type=int, default=64)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()
    before = os.getloadavg()[0]
    rows = [measure(kind, args.nodes, args.jobs, args.max_size, args.events) for kind in KINDS]
    about = {"target_ms": TARGET_MS, "load": [round(before, 1), round(os.getloadavg()[0], 1)]}
    if args.json:
        print(json.dumps({"benchmark": "goal_decisions", **about, "rows": rows}))
        return
    print("  ".join(f"{name:>10}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value!s:>10}" for value in row.values()))
    print(about)


if __name__ == "__main__":
    main()
