"""How many deadlines are met, of those that an oracle with the same nodes could meet, and what
that costs in samples.

    python -m benchmarks.deadlines --data ../shared/data [--seeds 3] [--days 8] [--json]

Each row is one machine's idle nodes (``nodes``), jobs drawn from one log (``jobs``: arrivals, sizes
and run times of batch jobs, as training jobs on 1 to so many nodes with the curves measured on
Summit), and a load: the jobs' work over what the idle nodes could do at best. Half of the jobs that
need ten minutes or more have a deadline, 1.5 to 5 times the time that they need on their largest
size. The same jobs run twice: with the deadlines (``met``, ``samples``), and as if they had none
(``plain_met``, ``plain_samples``).

The oracle (:func:`oracle`) knows every gap and every job beforehand, moves and starts jobs for
nothing, and serves nothing but deadlines: a mixed-integer program in spans of ``--span`` seconds.
``oracle`` is its proven upper bound. ``met_ratio`` is ``met`` over that, ``samples_ratio`` is
``samples`` over ``plain_samples``; ``work_ratio`` is the same in single-node seconds, in which a
sample of a slow model counts as much as many of a quick one. ``covered`` is the part of the jobs
that ended within the 80 % interval of their first forecast, among those that have ended.

Deadlines count that come due within the simulated time; the first day only fills the history of
nodes.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import highspy
import numpy as np
import numpy.typing as npt

from allocator import ScalingCurve
from malletrain.core.commands import Command
from malletrain.core.settings import ControllerSettings
from malletrain.sim.engine import Simulation
from malletrain.sim.idle import idle_nodes
from malletrain.sim.joblogs import read_log
from malletrain.sim.logged_jobs import JobLog
from malletrain.sim.settings import SimSettings
from malletrain.sim.workload_files import read_curves
from malletrain.sim.workloads import SimJob, arriving, hpo, with_deadlines
from scavenger.trace.files import read, read_names
from scavenger.trace.trace import Trace

HOUR_S, DAY_S = 3600.0, 86400.0
WARM_S = DAY_S
MIN_MET_RATIO, MIN_SAMPLES_RATIO = 0.95, 0.97
MAX_RUNNING = 64
"""Maximum number of simultaneous jobs: most jobs of Philly use one node, and the machines have up
to a hundred.
"""
LARGEST, LONGEST_S = 32, 12 * HOUR_S
"""Maximum nodes and duration of the jobs that are used: a single larger job would be a load by
itself.
"""


@dataclass(frozen=True)
class Case:
    """One row."""

    nodes: str
    jobs: str
    load: float
    seed: int = 0
    days: float = 8.0
    weight: float | None = None
    ahead: float | None = None


def log_of(name: str, data: Path) -> JobLog:
    """Return the log ``kth`` or ``philly``, whose GPUs count as nodes."""
    if name == "philly":
        return read_log(data / "hpc_jobs" / "philly_jobs.csv.gz", per_node=1)
    return read_log(data / "hpc_jobs" / "KTH-SP2-1996.swf.gz")


def trace_of(case: Case, data: Path) -> Trace:
    """Return the idle nodes: those that the jobs of KTH left, or 256 of Summit's."""
    span = case.days * DAY_S
    if case.nodes == "summit":
        names = read_names(data / "summit_nodes.txt")
        week = read(data / "summit_idle_week1.csv.gz", names=names)
        return week.window(0.0, min(span, week.duration_s)).sample(256, case.seed)
    begin = (40 + 25 * case.seed) * DAY_S
    return idle_nodes(log_of("kth", data)).trace.window(begin, begin + span)


def idle_over_time(trace: Trace, span_s: float) -> npt.NDArray[np.float64]:
    """Return the mean number of idle nodes in each span."""
    sums = np.zeros(math.ceil(trace.duration_s / span_s))
    idle, at = 0, 0.0

    def fill(to: float) -> None:
        nonlocal at
        while at < to:
            k = int(at / span_s + 1e-9)
            end = min(to, (k + 1) * span_s)
            sums[k] += idle * (end - at)
            at = end

    for batch in trace.batches():
        fill(batch.time)
        idle += len(batch.idle) - len(batch.busy)
    fill(trace.duration_s)
    return sums / span_s


def jobs_of(case: Case, trace: Trace, data: Path) -> list[SimJob]:
    """Return jobs drawn from a part of the log, as many as make the load; half of them have
    deadlines.
    """
    rng = np.random.default_rng((case.seed, 9))
    log = log_of(case.jobs, data)
    candidates = [j for j in log.jobs if j.run_s and j.run_s <= LONGEST_S and j.nodes <= LARGEST]
    span = trace.duration_s - WARM_S
    begin = candidates[len(candidates) // 3].submit_s + case.seed * 10 * DAY_S
    drawn = [j for j in candidates if begin <= j.submit_s < begin + span]
    capacity = float(idle_over_time(trace, HOUR_S).sum()) * HOUR_S * span / trace.duration_s
    part = case.load * capacity / sum(j.nodes * (j.run_s or 0.0) for j in drawn)
    selection = [j for j in drawn if rng.random() < part]
    arrivals = [(j.submit_s - begin + WARM_S, j.nodes, j.run_s or 0.0) for j in selection]
    curves = read_curves(data / "dnn_scaling_summit.csv")
    jobs = arriving(hpo(curves, len(arrivals), case.seed, max_nodes=64), arrivals)
    return with_deadlines(jobs, 0.5, seed=case.seed)


def segments(curve: ScalingCurve, most: int) -> list[tuple[float, float]]:
    """Return (nodes, samples/s per node) of the upper concave hull of the curve up to ``most``
    nodes.
    """
    points = [(0.0, 0.0), *((float(n), curve.at(n)) for n in range(1, most + 1))]
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) <= (
            y - hull[-2][1]
        ) * (hull[-1][0] - hull[-2][0]):
            hull.pop()
        hull.append((x, y))
    return [(b[0] - a[0], (b[1] - a[1]) / (b[0] - a[0])) for a, b in pairwise(hull) if b[1] > a[1]]


def oracle(jobs: list[SimJob], idle: npt.NDArray[np.float64], span_s: float) -> float:
    """Return a proven upper bound on the number of deadlines that can be met with perfect foresight
    and without costs of moving jobs.

    Args:
        jobs: the jobs with deadlines.
        idle: number of nodes in each span of ``span_s`` seconds.
    """
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("time_limit", 300.0)
    highs.setOptionValue("mip_rel_gap", 0.0)
    rows: dict[int, list[tuple[int, float]]] = {}
    for job in jobs:
        scale = job.samples
        done = highs.addVariable(0.0, 1.0, 1.0)
        highs.changeColIntegrality(done.index, highspy.HighsVarType.kInteger)
        terms = [(done.index, -1.0)]
        end = job.deadline_s or 0.0
        for k in range(int(job.submit_s / span_s), min(len(idle), math.ceil(end / span_s))):
            seconds = min(end, (k + 1) * span_s) - max(job.submit_s, k * span_s)
            if seconds <= 0:
                continue
            for width, rate in segments(job.curve, job.max_nodes):
                part = seconds / span_s
                used = highs.addVariable(0.0, width * part, 0.0)
                terms.append((used.index, rate * span_s / scale))
                rows.setdefault(k, []).append((used.index, 1.0))
        _add_row(highs, 0.0, highspy.kHighsInf, terms)
    for k, terms in rows.items():
        _add_row(highs, -highspy.kHighsInf, float(idle[k]), terms)
    highs.changeObjectiveSense(highspy.ObjSense.kMaximize)
    highs.run()
    return math.floor(highs.getInfo().mip_dual_bound + 1e-6)


def _add_row(highs: Any, low: float, high: float, terms: list[tuple[int, float]]) -> None:
    columns = np.array([column for column, _ in terms], dtype=np.int32)
    highs.addRow(low, high, len(terms), columns, np.array([x for _, x in terms]))


def play(
    trace: Trace,
    jobs: list[SimJob],
    case: Case,
    seen: dict[str, tuple[float, float]] | None = None,
) -> Simulation:
    """Run one simulation. ``seen``: gets the interval of each job's first forecast."""
    site = ControllerSettings()
    if case.weight is not None:
        site = replace(site, deadline_weight=case.weight)
    if case.ahead is not None:
        site = replace(site, deadline_ahead=case.ahead)
    simulation = Simulation(trace, jobs, SimSettings(site=site, max_running=MAX_RUNNING))
    if seen is not None:
        _record_first_forecasts(simulation, seen)
    simulation.run()
    return simulation


def _record_first_forecasts(simulation: Simulation, seen: dict[str, tuple[float, float]]) -> None:
    """Record the first forecast of every job of the simulation."""
    keeper = simulation.controller.goals
    notice = keeper.notice

    def notice_and_record(now: float) -> list[Command]:
        commands = notice(now)
        for name, record in keeper.records.items():
            forecast = record.forecast
            if name not in seen and forecast is not None and math.isfinite(forecast.high):
                seen[name] = (forecast.low, forecast.high)
        return commands

    keeper.notice = notice_and_record


def met(simulation: Simulation, due: dict[str, float]) -> int:
    """Return how many of these deadlines were met."""
    ends = {name: simulation.runs[name].ended_at for name in due}
    return sum(end is not None and end <= due[name] for name, end in ends.items())


def row(case: Case, data: Path, span_s: float) -> dict[str, Any]:
    """Return one row of the table."""
    trace = trace_of(case, data)
    jobs = jobs_of(case, trace, data)
    due = {j.name: d for j in jobs if (d := j.deadline_s) is not None and d <= trace.duration_s}
    idle = idle_over_time(trace, span_s)
    best = oracle([j for j in jobs if j.name in due], idle, span_s)
    plain = play(trace, [replace(job, deadline_s=None) for job in jobs], case)
    goals_seen: dict[str, tuple[float, float]] = {}
    goals = play(trace, jobs, case, goals_seen)
    samples = [math.fsum(run.done for run in s.runs.values()) for s in (plain, goals)]
    work = [
        math.fsum(run.done / run.job.curve.at(1) for run in s.runs.values()) for s in (plain, goals)
    ]
    deadlines_met = met(goals, due)
    inside = [
        low <= end <= high
        for name, (low, high) in goals_seen.items()
        if (end := goals.runs[name].ended_at) is not None
    ]
    return {
        **asdict(case),
        "count": len(jobs),
        "deadlines": len(due),
        "oracle": best,
        "met": deadlines_met,
        "plain_met": met(plain, due),
        "met_ratio": round(deadlines_met / best, 4) if best else None,
        "samples_ratio": round(samples[1] / samples[0], 4),
        "work_ratio": round(work[1] / work[0], 4),
        "covered": round(statistics.fmean(inside), 3) if inside else None,
        "idle": round(float(idle.mean()), 1),
        "plan_ms": round(1e3 * statistics.median(goals.decisions_s), 2),
        "plain_plan_ms": round(1e3 * statistics.median(plain.decisions_s), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the logs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--days", type=float, default=8.0, help="the first of them is warm-up")
    parser.add_argument("--load", type=float, action="append", help="default: 0.4 and 0.7")
    parser.add_argument("--world", action="append", help="NODES:JOBS; default: all")
    parser.add_argument("--weight", type=float, help="deadline_weight, default the product's")
    parser.add_argument("--ahead", type=float, help="deadline_ahead, default the product's")
    parser.add_argument("--span", type=float, default=900.0, help="seconds, of the oracle")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()
    worlds = args.world or ["kth:kth", "kth:philly", "summit:kth"]
    cases = [
        Case(nodes, jobs, load, seed, args.days, args.weight, args.ahead)
        for nodes, jobs in (world.split(":") for world in worlds)
        for load in args.load or (0.4, 0.7)
        for seed in range(args.seeds)
    ]
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=context) as pool:
        waiting = [pool.submit(row, case, args.data, args.span) for case in cases]
        for one in waiting:
            rows.append(one.result())
            if not args.json:
                if len(rows) == 1:
                    print("  ".join(f"{name:>10}" for name in rows[0]))
                print("  ".join(f"{value!s:>10}" for value in rows[-1].values()), flush=True)
    sums = {key: sum(r[key] for r in rows) for key in ("met", "plain_met", "oracle")}
    mean_samples_ratio = statistics.fmean(r["samples_ratio"] for r in rows)
    about = {
        **sums,
        "met_ratio": round(sums["met"] / max(1, sums["oracle"]), 4),
        "samples_ratio": round(mean_samples_ratio, 4),
        "target_met_ratio": MIN_MET_RATIO,
        "target_samples_ratio": MIN_SAMPLES_RATIO,
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }
    print(json.dumps({"benchmark": "deadlines", **about, "rows": rows} if args.json else about))


if __name__ == "__main__":
    main()
