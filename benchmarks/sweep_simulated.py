"""A sweep of 500 trials on 1,000 nodes of a real week, in the simulator: what malleable trials cost
at the time that trials of fixed sizes take, and the sweep's trials as a workload.

    python -m benchmarks.sweep_simulated --trace summit_idle_week1.csv.gz \
        --node-list summit_nodes.txt --table nasbench101_sample30k.csv.gz

The trials are cells of NAS-Bench-101's sample. Successive halving decides how far each trains: of
so many trials the best third by their real accuracies after 4, 12 and 36 epochs goes on, up to 108.
How fast a cell trains on n nodes follows from its parameters and operations, as in ``malletrain
simulate --workload nas``. As in RubberBand (arXiv 2103.07974) two things count, the hours until the
last trial has ended and the node-hours that trials held, and costs are compared at equal time.

``--write FILE`` writes the trials as a workload instead, for ``malletrain simulate --workload
FILE`` and the figures of docs/evaluation.md.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from malletrain.sim.engine import simulate
from malletrain.sim.nas import NAS_SAMPLES, network, parse_cell
from malletrain.sim.settings import SimSettings
from malletrain.sim.workloads import NODE, TRAINING_COST, SimJob
from scavenger.trace.files import read, read_names
from scavenger.trace.trace import Trace

RUNGS = (4, 12, 36, 108)
"""Epochs for which the sample contains accuracies."""
REDUCTION = 3
USER = "sweep"
LARGEST = 64
SIZE = 224


@dataclass(frozen=True)
class SweepOutcome:
    """One simulation of the whole sweep."""

    way: str
    hours: float
    """Hours until the last trial had ended."""
    node_hours: float
    """Node-hours of trials, with pauses and repeated work."""
    ended: int
    """Number of completed trials; fewer than all if the trace ended first."""
    rescales: int
    preemptions: int


def halved(accuracies: Sequence[Sequence[float]]) -> list[int]:
    """Return how many epochs each trial trains: rows are trials, columns :data:`RUNGS`."""
    last = [RUNGS[0]] * len(accuracies)
    survivors = list(range(len(accuracies)))
    for rung, further in enumerate(RUNGS[1:]):
        survivors.sort(key=lambda trial: -accuracies[trial][rung])
        survivors = survivors[: max(1, len(survivors) // REDUCTION)]
        for trial in survivors:
            last[trial] = further
    return last


def trials(table: Path, count: int, seed: int, samples: float) -> list[SimJob]:
    """Return the trials as jobs. ``samples``: samples of a trial that trains to its end."""
    with gzip.open(table, "rt") as file:
        cells = random.Random(seed).sample(list(csv.DictReader(file)), count)
    epochs = halved([[float(cell[f"val_acc_{rung}ep"]) for rung in RUNGS] for cell in cells])
    sizes = [1 << power for power in range(LARGEST.bit_length())]
    jobs = []
    for number, (cell, until) in enumerate(zip(cells, epochs, strict=True)):
        net = network(
            parse_cell(int(cell["num_vertices"]), cell["adjacency_rowmajor"], cell["interior_ops"]),
            size=SIZE,
        )
        curve = NODE.curve(TRAINING_COST * net.flops, net.parameters, sizes)
        work = samples * until / RUNGS[-1]
        jobs.append(
            SimJob(
                f"trial-{number}",
                1,
                LARGEST,
                work,
                curve,
                stated_curve=curve,
                model="nas",
                parameters=net.parameters,
                flops=TRAINING_COST * net.flops,
                user=USER,
            )
        )
    return jobs


def ways() -> Iterator[tuple[str, int, int]]:
    """(name, minimum, maximum nodes of a trial)."""
    for most in (64, 16, 4, 2):
        yield f"malleable 1:{most}", 1, most
    for size in (1, 4, 16):
        yield f"fixed {size}", size, size


def outcome(
    way: str, least: int, most: int, jobs: Sequence[SimJob], trace: Trace, at_once: int
) -> SweepOutcome:
    """Simulate one way."""
    sized = [replace(job, min_nodes=least, max_nodes=most) for job in jobs]
    result = simulate(trace, sized, SimSettings(max_running=at_once))
    return SweepOutcome(
        way,
        result.hours,
        result.node_hours_by_user[USER],
        result.jobs_completed,
        result.rescales,
        result.preemptions,
    )


def cost_at(hours: float, outcomes: Sequence[SweepOutcome]) -> float:
    """Return the node-hours of a malleable sweep of this duration, interpolated between those that
    were simulated; NaN if none is that fast.
    """
    points = sorted((o.hours, o.node_hours) for o in outcomes if o.way.startswith("malleable"))
    cheapest: list[tuple[float, float]] = []
    for at, cost in points:  # a longer time also allows the fastest one
        cheapest.append((at, min([cost, *(c for _, c in cheapest)])))
    if hours < cheapest[0][0]:
        return float("nan")
    times, costs = zip(*cheapest, strict=True)
    return float(np.interp(hours, times, costs))


def write(path: Path, jobs: Sequence[SimJob]) -> None:
    """Write the trials as a workload of ``malletrain simulate``."""
    rows = [
        {
            "name": job.name,
            "model": job.model,
            "samples": job.samples,
            "curve": {str(k): rate for k, rate in job.curve.points},
            "max_nodes": job.max_nodes,
            "stated_curve": "none",
            "parameters": job.parameters,
            "flops": job.flops,
            "user": job.user,
        }
        for job in jobs
    ]
    path.write_text(json.dumps(rows, indent=0), "utf-8")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--node-list", type=Path)
    parser.add_argument("--table", type=Path, required=True, help="NAS-Bench-101's sample")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=100, help="trials at a time")
    parser.add_argument("--samples", type=float, default=NAS_SAMPLES, help="of a whole trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the workload")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    jobs = trials(args.table, args.trials, args.seed, args.samples)
    if args.write:
        write(args.write, jobs)
        return
    if args.trace is None:
        parser.error("give --trace, or --write")
    names = read_names(args.node_list) if args.node_list else None
    trace = read(args.trace, names=names).sample(args.nodes, args.seed)
    outcomes = [outcome(*way, jobs, trace, args.at_once) for way in ways()]
    rows = [
        {**vars(each), "malleable_at_equal_time": cost_at(each.hours, outcomes)}
        for each in outcomes
    ]
    if args.json:
        print(json.dumps({"load": os.getloadavg()[0], "rows": rows}))
        return
    print(
        f"{'way':15} {'hours':>6} {'node-hours':>11} {'malleable then':>15} {'ended':>6} rescales"
    )
    for row in rows:
        print(
            f"{row['way']:15} {row['hours']:6.2f} {row['node_hours']:11.1f} "
            f"{row['malleable_at_equal_time']:15.1f} {row['ended']:6} {row['rescales']}"
        )


if __name__ == "__main__":
    main()
