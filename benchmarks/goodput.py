"""Measures which part of its time a job trains while its nodes come and go as often as on Summit.

    python -m benchmarks.goodput --trace week1.csv.gz --node-list nodes.txt --curves scaling.csv
    python -m benchmarks.goodput --real [--mode live restart] [--minutes 8] [--every 120] [--json]

Goodput is the part of the time with nodes in which the job processes samples whose work is not lost
later.

``--trace``: simulates long jobs, ``--jobs`` at a time, on ``--nodes`` of the machine's nodes, for
24 hours from hour 60 and five random choices of nodes and jobs, with each model and mode of
:data:`COSTS`. These are measured costs of a change of nodes (benchmarks.figures 3.3, two cores;
benchmarks.rescale --device cuda, an H100). The goodput is one of node-seconds. ``minutes`` is the
mean time between two changes of a job's nodes (starts, rescales and losses). ``notice_s`` is the
notice of the main scheduler. Without notice a lost node costs the work since the last snapshot (at
most a minute) in restart mode, and one step in live mode if the job has another node.

``--real``: a training of 10 MB on four virtual nodes of the embedded cluster (benchmarks.rescale),
whose nodes change every ``--every`` seconds: it shrinks, grows, and loses a node without notice,
which comes back. The lost time is computed from the times of rank 0's steps: each gap between two
steps on different nodes, less one usual step, and the time of repeated steps. ``usual_pace`` is the
time of all steps, each counted once at the median time of a step on as many nodes, divided by the
whole time: its difference from 1 also contains the cost of other programs on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from allocator import ScalingCurve
from benchmarks import end_in_order
from malletrain.sim.engine import Simulation
from malletrain.sim.model_jobs import Cause, CostModel, Mode
from malletrain.sim.settings import SimSettings
from malletrain.sim.workload_files import read_curves
from malletrain.sim.workloads import hpo
from scavenger.trace.files import read, read_names
from scavenger.trace.trace import Trace

LIVER_GOODPUT = 0.99
"""Goodputs published as "up to" by LiveR (arXiv 2605.22014), with other models and another
volatility.
"""
FIRST_HOUR, HOURS = 60.0, 24.0
LONG_SAMPLES = 1e12
"""Number of samples of a job that does not end within the simulation."""
NODES = 4
"""Virtual nodes of the real training."""


@dataclass(frozen=True)
class ChangeCosts:
    """Measured costs of a change of nodes, seconds. ``down_s`` is the larger one of shrinking and
    of losing a node.
    """

    model: str
    mode: Mode
    up_s: float
    down_s: float
    start_s: float
    step_s: float = 0.5


COSTS = (
    ChangeCosts("shufflenet, 9 MB, CPU", "live", 0.10, 0.11, 0.52),
    ChangeCosts("shufflenet, 9 MB, CPU", "restart", 0.55, 0.50, 0.67),
    ChangeCosts("AlexNet, 244 MB, CPU", "live", 1.57, 0.73, 2.52),
    ChangeCosts("AlexNet, 244 MB, CPU", "restart", 3.42, 3.02, 2.15),
    ChangeCosts("400 MB, H100", "live", 1.10, 0.34, 3.8),
    ChangeCosts("400 MB, H100", "restart", 5.5, 4.6, 3.2),
    ChangeCosts("as published for Summit", "restart", 18.0, 12.0, 18.0),
)


def goodput(simulation: Simulation) -> dict[str, float]:
    """Return the goodput of all jobs of a simulation, and how often their nodes change."""
    runs = list(simulation.runs.values())
    total = sum(sum(run.node_s.values()) for run in runs)
    useful = sum(run.node_s[None] - run.redone_node_s for run in runs)
    changes = sum(run.starts + run.rescales + run.preemptions for run in runs)
    return {
        "goodput": useful / total,
        "minutes": sum(run.allocated_s for run in runs) / max(1, changes) / 60.0,
        "starting": sum(run.node_s[Cause.START] for run in runs) / total,
        "rescaling": sum(run.node_s[Cause.RESCALE] for run in runs) / total,
        "losses": sum(run.node_s[Cause.PREEMPTION] + run.redone_node_s for run in runs) / total,
    }


def simulated(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each number of jobs, notice, model and mode."""
    names = read_names(args.node_list) if args.node_list else None
    begin_s = FIRST_HOUR * 3600.0
    window = read(args.trace, names=names).window(begin_s, begin_s + args.hours * 3600.0)
    curves = read_curves(args.curves)
    return [
        simulated_row(window, curves, args, jobs, notice_s, measured)
        for jobs in args.jobs
        for notice_s in args.notice
        for measured in COSTS
    ]


def simulated_row(
    window: Trace,
    curves: Mapping[str, ScalingCurve],
    args: argparse.Namespace,
    count: int,
    notice_s: float,
    measured: ChangeCosts,
) -> dict[str, Any]:
    """Return the means over the draws, with ``count`` jobs at a time."""
    costs = CostModel(
        up_s=measured.up_s,
        down_s=measured.down_s,
        start_s=measured.start_s,
        notice_s=notice_s,
        mode=measured.mode,
        step_s=measured.step_s,
    )
    draws = []
    for seed in range(args.seeds):
        jobs = hpo(curves, count, seed, samples=LONG_SAMPLES)
        settings = SimSettings(costs=costs, max_running=count)
        simulation = Simulation(window.sample(args.nodes, seed), jobs, settings)
        simulation.run()
        draws.append(goodput(simulation))
    values = [draw["goodput"] for draw in draws]
    return {
        "jobs": count,
        "model": measured.model,
        "mode": measured.mode,
        "notice_s": notice_s,
        "goodput": round(statistics.fmean(values), 4),
        "spread": [round(min(values), 4), round(max(values), 4)],
        **{
            key: round(statistics.fmean(draw[key] for draw in draws), 4)
            for key in ("minutes", "starting", "rescaling", "losses")
        },
    }


Steps = Sequence[tuple[float, int, int]]
"""Return (time, number, nodes) of each step, in order of time."""


def usual_s(steps: Steps) -> dict[int, float]:
    """Return number of nodes → median time between two steps on that many nodes, seconds."""
    gaps: defaultdict[int, list[float]] = defaultdict(list)
    for before, after in pairwise(steps):
        if not _is_change(before, after):
            gaps[after[2]].append(after[0] - before[0])
    return {nodes: statistics.median(values) for nodes, values in gaps.items()}


def lost_s(steps: Steps) -> float:
    """Return the time that changes of nodes cost, seconds: each gap between two steps on different
    nodes, or before a repeated step, less one usual step; and the usual time of repeated steps.
    """
    usual = usual_s(steps)
    lost = 0.0
    for before, after in pairwise(steps):
        if _is_change(before, after):
            step_s = usual.get(after[2], 0.0)
            repeated = max(0, before[1] - after[1] + 1)
            lost += max(0.0, after[0] - before[0] - step_s) + repeated * step_s
    return lost


def useful_s(steps: Steps) -> float:
    """Return the usual time of all steps, each counted once, seconds."""
    usual = usual_s(steps)
    nodes_of = {number: nodes for _, number, nodes in steps}
    first = steps[0][1]
    return sum(usual.get(nodes, 0.0) for number, nodes in nodes_of.items() if number != first)


def _is_change(before: tuple[float, int, int], after: tuple[float, int, int]) -> bool:
    return before[2] != after[2] or after[1] != before[1] + 1


def real(mode: str, minutes: float, every_s: float) -> dict[str, Any]:
    """Return the goodput of a training whose nodes change."""
    from benchmarks.rescale import StepLog
    from benchmarks.rescale_modes import CONTENDERS, until

    with tempfile.TemporaryDirectory(prefix="mt-goodput-") as folder:
        root = Path(folder)
        log = StepLog(root / "steps")
        snapshot = ["--steps-file", str(log.path), "--snapshot", str(root / "snapshot")]
        contender = CONTENDERS[mode](root, NODES, ["--mb", "10", "--device", "cpu", *snapshot])
        changes = 0
        try:
            contender.start()
            until(lambda: log.settled(NODES, 0.0), f"{mode} trains on {NODES} nodes")
            began = time.time()
            actions = [
                lambda: contender.shrink(1),
                lambda: contender.grow(1),
                contender.lose,
                lambda: contender.shrink(2),
                lambda: contender.grow(2),
            ]
            while (due := began + (changes + 1) * every_s) < began + 60.0 * minutes:
                until(lambda due=due: time.time() >= due, "the next change", every_s + 60.0)
                actions[changes % len(actions)]()
                changes += 1
            end = began + 60.0 * minutes
            until(lambda: time.time() >= end, "the end", every_s + 60.0)
        except RuntimeError:
            print(contender.last_words(), file=sys.stderr)
            raise
        finally:
            contender.stop()
        steps = [step for step in log.steps() if began <= step[0] <= end]
    whole_s = steps[-1][0] - steps[0][0]
    return {
        "mode": mode,
        "goodput": round(1.0 - lost_s(steps) / whole_s, 4),
        "usual_pace": round(useful_s(steps) / whole_s, 4),
        "seconds": round(whole_s, 1),
        "changes": changes,
        "steps": len({number for _, number, _ in steps}),
        "repeated": len(steps) - len({number for _, number, _ in steps}),
        "pauses_s": [round(b[0] - a[0], 2) for a, b in pairwise(steps) if _is_change(a, b)],
        "step_s": {nodes: round(step_s, 3) for nodes, step_s in usual_s(steps).items()},
    }


def main() -> None:
    end_in_order()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="trace of idle nodes, for the simulator")
    parser.add_argument("--node-list", type=Path, help="all nodes of the machine")
    parser.add_argument("--curves", type=Path, help="scaling curves")
    parser.add_argument("--nodes", type=int, default=512, help="nodes, drawn from the machine's")
    parser.add_argument("--jobs", type=int, nargs="+", default=[10, 40], help="concurrent jobs")
    parser.add_argument("--hours", type=float, default=HOURS)
    parser.add_argument("--seeds", type=int, default=5, help="random choices of nodes and jobs")
    parser.add_argument("--notice", type=float, nargs="+", default=[0.0, 30.0], metavar="S")
    parser.add_argument("--real", action="store_true", help="processes instead of the simulator")
    parser.add_argument("--mode", nargs="+", default=["live", "restart"], help="for --real")
    parser.add_argument("--minutes", type=float, default=8.0, help="for --real")
    parser.add_argument("--every", type=float, default=120.0, help="seconds, for --real")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()
    if args.real:
        rows = [real(mode, args.minutes, args.every) for mode in args.mode]
    elif args.trace and args.curves:
        rows = simulated(args)
    else:
        parser.error("give --trace and --curves, or --real.")
    load = round(os.getloadavg()[0], 2)
    about = {"published": LIVER_GOODPUT, "cpus": os.cpu_count(), "load": load}
    if args.json:
        print(json.dumps({"benchmark": "goodput", **about, "rows": rows}))
        return
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    print(about)


if __name__ == "__main__":
    main()
