"""The figures of docs/evaluation.md, one command each: the dissertation's by their numbers, ours by
their names.

    python -m benchmarks.figures 3.10 --trace week1.csv.gz --node-list nodes.txt --curves
    scaling.csv [--out docs/images] [--json]

* ``3.3``, ``3.12``: :mod:`benchmarks.model_figures`;
* ``3.6``: solve time against the number of trainers that decide at once
  (:mod:`benchmarks.trainers`; no trace needed);
* ``3.7``, ``3.8``, ``3.9``: :mod:`benchmarks.gap_figures`;
* ``3.10``, its half in replay: MalleTrain, which profiles its jobs and pays for it, against
  FreeTrain, which believes what owners state, for hyperparameter and architecture search; by what
  owners state (their true curve, another model's, a linear one, nothing); once with the same ten
  jobs all the time (*long*) and once with jobs that end and make room for the next (*stream*);
  ``--jobs FILE``: with the jobs of a workload instead, such as the trials of a sweep
  (:mod:`benchmarks.sweep_simulated`), in an order of each seed's own;
* ours, ``t_fwd``: samples over the forward-looking time, exact plans and equal division;
* ours, ``jobs``: samples over the number of jobs at a time;
* ours, ``pauses``: samples over what a rescale costs, in restart and in live mode.

Ours have long jobs: where jobs end, policies are soon left with different jobs, and samples compare
the jobs as much as the policies. Samples are divided by those of the same jobs on the same nodes in
a world without costs (policy ``ideal``). Every point is the mean over ``--seeds`` draws of nodes
and jobs, with the standard deviation. The trace's ``--from`` to ``--from + --hours`` is simulated
on ``--nodes`` of its nodes. Prints a Markdown table (or, with ``--json``, one object) and writes
the picture.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from benchmarks import gap_figures, model_figures
from benchmarks.pictures import COLOURS, Mean, draw, finish, mean_of, tell
from malletrain.core import defaults
from malletrain.core.settings import ControllerSettings, ProfilingSettings
from malletrain.sim.engine import Simulation
from malletrain.sim.idle import idle_nodes
from malletrain.sim.joblogs import read_log
from malletrain.sim.model_jobs import CostModel
from malletrain.sim.nas import nas
from malletrain.sim.policies import POLICIES
from malletrain.sim.settings import SimSettings
from malletrain.sim.workload_files import read_curves, read_workload
from malletrain.sim.workloads import CurveStatement, built_in, hpo, with_stated_curves
from scavenger.trace.files import read, read_names
from scavenger.trace.trace import Trace

STREAM = 600
"""Number of jobs of a stream: more than any policy completes in two days."""
ENDLESS = 1e18
"""Samples of a job that does not end within the trace."""


@dataclass(frozen=True)
class World:
    """Common settings of all points of a figure."""

    trace: str
    """A trace of idle nodes, or a log of jobs (SWF) whose idle nodes are used."""
    node_list: str | None
    curves: str | None
    nodes: int
    begin_h: float
    hours: float
    jobs: str | None = None
    """A workload in place of the two random ones."""


@dataclass(frozen=True)
class Point:
    """One simulation: ``line`` and ``x`` are its place in the figure."""

    line: str
    x: str
    seed: int = 0
    workload: str = "hpo"
    length: Literal["long", "stream"] = "long"
    states: CurveStatement = "exact"
    policy: str = "malletrain"
    max_jobs: int = 10
    t_fwd: float = 120.0
    starvation: float = defaults.STARVATION_S
    turns_apart: float = ControllerSettings.turns_apart
    mode: str = "restart"
    up: float = 18.0
    down: float = 12.0
    start: float = 18.0
    when_worth: bool = True
    revealed: bool = False
    sized: bool = False


@lru_cache(maxsize=2)
def _trace(world: World) -> Trace:
    if world.trace.removesuffix(".gz").endswith(".swf"):
        whole = idle_nodes(read_log(world.trace)).trace
    else:
        whole = read(world.trace, names=read_names(world.node_list) if world.node_list else None)
    begin = world.begin_h * 3600.0
    return whole.window(begin, min(whole.duration_s, begin + world.hours * 3600.0))


def simulation(world: World, point: Point) -> Simulation:
    """A simulation that has not run yet."""
    p, whole = point, _trace(world)
    trace = whole.sample(world.nodes, p.seed) if world.nodes < len(whole.names) else whole
    curves = read_curves(world.curves) if world.curves else built_in()
    count = STREAM if p.length == "stream" else p.max_jobs
    if world.jobs:
        jobs = read_workload(world.jobs)
        np.random.default_rng((p.seed, 11)).shuffle(jobs)
    else:
        jobs = nas(count, p.seed) if p.workload == "nas" else hpo(curves, count, p.seed)
    if p.length == "long":
        jobs = [replace(job, samples=ENDLESS) for job in jobs]
    costs = CostModel("real", p.up, p.down, p.start, mode="live" if p.mode == "live" else "restart")
    site = ControllerSettings(
        profiling=ProfilingSettings(when_worth=p.when_worth), turns_apart=p.turns_apart
    )
    settings = SimSettings(
        POLICIES[p.policy],
        costs,
        max_running=p.max_jobs,
        t_fwd_s=p.t_fwd,
        starvation_s=p.starvation,
        seed=p.seed,
        site=site,
        revealed=p.revealed,
        sized=p.sized,
    )
    return Simulation(trace, with_stated_curves(jobs, p.states, p.seed), settings)


def play(world: World, point: Point) -> dict[str, Any]:
    """Run the simulation. Return its result as plain values."""
    return {**simulation(world, point).run().to_dict(), **asdict(point)}


def against_freetrain(
    lengths: Sequence[Literal["long", "stream"]] = ("long", "stream"),
    workloads: Sequence[str] = ("hpo", "nas"),
) -> list[Point]:
    """Return the points of FreeTrain by what owners state, and of MalleTrain, which measures
    whatever they state, with and without turns for starving jobs.
    """
    points = []
    for length in lengths:
        for workload in workloads:
            base = Point(
                "FreeTrain",
                f"{length} {workload}",
                workload=workload,
                length=length,
                policy="freetrain",
            )
            points += [
                replace(base, x=f"{base.x} {states}", states=states)
                for states in get_args(CurveStatement)
            ]
            base = replace(
                base,
                line="MalleTrain",
                x=f"{base.x} none",
                states="none",
                policy="profiled",
                starvation=float("inf"),
            )
            points += [base, replace(base, line="MalleTrain, with turns", starvation=600.0)]
    return points


def forward() -> list[Point]:
    """Return points by the forward-looking time."""
    times = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
    lines = (("exact plans", "malletrain"), ("equal division", "equal"))
    return [Point(line, f"{t:g}", policy=policy, t_fwd=t) for line, policy in lines for t in times]


def at_a_time() -> list[Point]:
    """Return points by the number of simultaneous jobs."""
    lines = (
        ("exact plans", "malletrain"),
        ("equal division", "equal"),
        ("first come, first served", "fcfs"),
    )
    return [
        Point(line, f"{n}", policy=policy, max_jobs=n)
        for line, policy in lines
        for n in (1, 5, 10, 20, 50)
    ]


def pauses() -> list[Point]:
    """Return points by the pauses of growing, shrinking and starting as multiples of Summit's, in
    both modes.
    """
    return [
        Point(f"{mode} mode", f"{18 * f:g}", mode=mode, up=18 * f, down=12 * f, start=18.0)
        for mode in ("restart", "live")
        for f in (1 / 18, 1 / 6, 1 / 3, 2 / 3, 1.0, 2.0)
    ]


FIGURES: dict[str, tuple[Callable[[], list[Point]], str]] = {
    "3.10": (against_freetrain, "what owners state of their jobs"),
    "t_fwd": (forward, "forward-looking time in seconds"),
    "jobs": (at_a_time, "jobs at a time"),
    "pauses": (pauses, "pause of a growth in seconds"),
}


OTHERS: dict[str, Callable[[argparse.Namespace], None]] = {
    "3.3": model_figures.rescale_cost,
    **{which: partial(gap_figures.figure, which) for which in ("3.7", "3.8", "3.9")},
    "3.12": model_figures.scaling,
}


def picture_of(figure: str) -> str:
    """Return the name of its file."""
    return f"{'fig' if figure[0].isdigit() else 'ours-'}{figure.replace('.', '-')}.png"


def without_costs(point: Point) -> Point:
    """Return the points of the same jobs on the same nodes without costs."""
    return Point(
        "ideal",
        "",
        seed=point.seed,
        workload=point.workload,
        length=point.length,
        policy="ideal",
        max_jobs=point.max_jobs,
    )


def measure(world: World, points: Sequence[Point], seeds: int, processes: int) -> list[Mean]:
    """Run all points with all seeds, in ``processes`` processes."""
    work = [replace(p, seed=seed) for p in points for seed in range(seeds)]
    bounds = list(dict.fromkeys(map(without_costs, work)))
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        every = list(
            pool.map(play, [world] * (len(work) + len(bounds)), [*work, *bounds], chunksize=1)
        )
    results, best = (
        every[: len(work)],
        {p: r["samples"] for p, r in zip(bounds, every[len(work) :], strict=True)},
    )
    for p, r in zip(work, results, strict=True):
        r["of_ideal"] = r["samples"] / best[without_costs(p)]
    means = []
    for k, p in enumerate(points):
        runs = tuple(results[k * seeds : (k + 1) * seeds])
        means.append(Mean(p.line, p.x, *mean_of([r["of_ideal"] for r in runs]), runs))
    return means


def trainers(args: argparse.Namespace) -> None:
    """Measure the solve time against the number of trainers."""
    from matplotlib.figure import Figure

    command = [
        sys.executable,
        "-m",
        "benchmarks.trainers",
        "--json",
        *(["--repeats", str(args.repeats)] if args.repeats else []),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rows = rows[0]["rows"] if len(rows) == 1 and "rows" in rows[0] else rows
    if args.json:
        print(json.dumps({"figure": "3.6", "rows": rows}))
    else:
        print("| trainers | median ms | worst ms |\n|---|---|---|")
        for r in rows:
            print(f"| {r['trainers']} | {r['median_ms']:.1f} | {r['worst_ms']:.1f} |")
    picture = Figure(figsize=(6.4, 3.6), dpi=100, layout="constrained")
    axes = picture.subplots()
    axes.plot(
        [r["trainers"] for r in rows],
        [r["median_ms"] for r in rows],
        color=COLOURS[0],
        marker="o",
        label="median",
    )
    axes.plot(
        [r["trainers"] for r in rows],
        [r["worst_ms"] for r in rows],
        color=COLOURS[1],
        marker="s",
        label="worst",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks([r["trainers"] for r in rows], [str(r["trainers"]) for r in rows])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="trainers deciding at once", ylabel="solve time, ms")
    axes.legend(frameon=False)
    finish(picture, args.out / picture_of("3.6"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", choices=[*OTHERS, "3.6", *FIGURES])
    parser.add_argument("--trace")
    parser.add_argument("--node-list")
    parser.add_argument("--log", action="append", default=[], help="a log of jobs (3.7 to 3.9)")
    parser.add_argument("--days", type=float, help="of 3.7 to 3.9; default: all")
    parser.add_argument(
        "--model",
        choices=list(model_figures.MEGABYTES),
        nargs="+",
        default=["shufflenet", "resnet18", "AlexNet"],
        help="of 3.3",
    )
    parser.add_argument("--mode", nargs="+", default=["live", "restart"], help="of 3.3")
    parser.add_argument("--ranks", type=int, default=3, help="virtual nodes of 3.3")
    parser.add_argument(
        "--curves", help="scaling curves of the hyperparameter search; default: built-in models"
    )
    parser.add_argument("--jobs", type=Path, metavar="FILE", help="of 3.10; default: drawn ones")
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--from", dest="begin_h", type=float, default=60.0, metavar="H")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=0, help="of 3.3 and 3.6")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.figure == "3.12" and not args.curves:
        parser.error("--curves is needed for this figure.")
    if args.figure in ("3.7", "3.8", "3.9") and not (args.trace or args.log):
        parser.error("--trace or --log is needed for this figure.")
    if args.figure in OTHERS:
        OTHERS[args.figure](args)
        return
    if args.figure == "3.6":
        trainers(args)
        return
    if not args.trace:
        parser.error("--trace is needed for this figure.")
    points, axis = FIGURES[args.figure]
    picture = picture_of(args.figure)
    jobs = None
    if args.jobs:
        if args.figure != "3.10":
            parser.error("--jobs goes with figure 3.10.")
        jobs = str(args.jobs)
        points = partial(against_freetrain, ["stream"], [args.jobs.stem])
        picture = f"fig3-10-{args.jobs.stem}.png"
    world = World(
        args.trace, args.node_list, args.curves, args.nodes, args.begin_h, args.hours, jobs
    )
    began = time.perf_counter()
    means = measure(world, points(), args.seeds, args.processes)
    if args.json:
        rows = [
            {"line": m.line, "x": m.x, "mean": m.mean, "spread": m.spread, "runs": m.runs}
            for m in means
        ]
        print(
            json.dumps(
                {"figure": args.figure, "world": asdict(world), "seeds": args.seeds, "rows": rows}
            )
        )
    else:
        print("\n".join(tell(args.figure, axis, means)))
    draw(args.figure, axis, means, args.out / picture)
    print(
        f"{len(points()) * args.seeds} simulations in {time.perf_counter() - began:.0f} s",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
