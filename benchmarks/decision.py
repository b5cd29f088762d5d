"""How long the controller takes from an event to its commands, with and without shares.

    python -m benchmarks.decision [--nodes 10624] [--jobs 200] [--max-size 64] [--repeats 50]

The controller has all nodes and jobs of five parties, whose curves are random
(:mod:`benchmarks.instances`). Each repeat takes some nodes away, gives others back, and measures
the step in which the controller counts, makes bids, solves and names the nodes. With shares the
parties' factors lie between 1/16 and 16, drawn anew for each repeat. ``median_ms`` and ``worst_ms``
are wall time, ``cpu_median_ms`` processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from functools import partial

import numpy as np

from benchmarks.instances import random_curve
from malletrain.core.commands import Rescale as Move
from malletrain.core.commands import Start
from malletrain.core.controller import Controller
from malletrain.core.events import JobSubmitted, NodeJoined, NodeLost, Tick
from malletrain.core.events import RescaleFinished as Up
from malletrain.core.planning import exact, make_plan
from malletrain.core.settings import ControllerSettings, PlanningSettings, ShareSettings
from malletrain.core.shares import MOST_DOUBLINGS, PartyService

PARTIES = ("ada", "bob", "cyd", "dan", "eve")
HOUR = 3600.0


def measure(
    nodes: int, jobs: int, max_size: int, repeats: int, *, shares: bool
) -> dict[str, float]:
    """One row."""
    rng = np.random.default_rng(0)
    settings = ControllerSettings(
        PlanningSettings(max_running=jobs),
        min_interval_s=0.0,
        shares=ShareSettings(dict(zip(PARTIES, (1, 1, 2, 2, 4), strict=True))) if shares else None,
    )
    solver = partial(exact, clock=time.perf_counter)
    controller = Controller(settings, planner=partial(make_plan, solver=solver))
    now = 0.0

    def do(*events: object) -> None:
        for command in controller.handle_all(events, now):  # type: ignore[arg-type]
            if isinstance(command, Start | Move):
                controller.handle(Up(command.job), now)

    do(*(NodeJoined(f"n{k:05}") for k in range(nodes)))
    for j in range(jobs):
        curve = random_curve(rng, max_size, rough=j % 2 == 0)
        party = PARTIES[j % len(PARTIES)] if shares else ""
        do(JobSubmitted(f"j{j:04}", 1, max_size, curve=curve, party=party))
    wall, cpu = [], []
    gone: list[str] = []
    for _ in range(repeats + 1):
        now += 60.0
        do(Tick())
        back, gone = gone, [f"n{k:05}" for k in rng.choice(nodes, nodes // 100, replace=False)]
        do(*map(NodeJoined, back), *map(NodeLost, gone))
        if shares:
            behind = rng.uniform(-MOST_DOUBLINGS, MOST_DOUBLINGS, len(PARTIES)) * 4 * HOUR
            due = 1000 * HOUR
            found = {
                party: PartyService(due - late, due, due)
                for party, late in zip(PARTIES, behind.tolist(), strict=True)
            }
            controller.shares.restore(found, now)
        now += 5.0
        plans = controller.plans
        began, began_cpu = time.perf_counter(), time.process_time()
        commands = controller.handle(Tick(), now)
        taken = time.perf_counter() - began, time.process_time() - began_cpu
        if controller.plans > plans:  # else the events themselves were followed by a plan
            wall.append(1e3 * taken[0])
            cpu.append(1e3 * taken[1])
        for command in commands:
            if isinstance(command, Start | Move):
                controller.handle(Up(command.job), now)
    return {
        "median_ms": statistics.median(wall[1:]),
        "worst_ms": max(wall[1:]),
        "cpu_median_ms": statistics.median(cpu[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=10624)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--max-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    args = parser.parse_args()
    for shares in (False, True):
        before = os.getloadavg()[0]
        found = measure(args.nodes, args.jobs, args.max_size, args.repeats, shares=shares)
        row = {"shares": shares, **found, "load": [round(before, 1), round(os.getloadavg()[0], 1)]}
        if args.json:
            print(json.dumps(row), flush=True)
        else:
            cells = "  ".join(f"{name} {value:.1f}" for name, value in found.items())
            print(f"{'shares' if shares else 'plain':>7}  {cells}  load {row['load']}", flush=True)


if __name__ == "__main__":
    main()
