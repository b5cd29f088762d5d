"""How good the forecasts of gaps by their age are: Brier score on a trace, against the base rate;
and what they are worth in a simulation.

    python -m benchmarks.lifetimes (--trace CSV [--node-list TXT] | --log SWF) [--from-day 0]
    [--days 14] [--train 8] [--poll 60] [--every 300] [--json]
    python -m benchmarks.lifetimes … --worth CURVES [--nodes N] [--jobs 5] [--max-size 32]
    [--snapshot-cost 0.2]

The trace is polled as the daemon polls a machine; ``--log``: the nodes that the jobs of a log left
idle. For its first ``--train`` days the forecasts learn; every ``--every`` seconds of the days
after, each node in a gap gets the probability that it is idle still after one minute to four hours,
and the trace says what came of it. Gaps whose end the trace does not show within that time are left
out. Contenders:

* ``base rate``: how many of all gaps open at such moments of the training days lasted so long;
* ``by age``: the life table of gap lengths given the gap's age (:mod:`scavenger.horizon`), which
  learns on, as in the daemon.

Brier score: mean squared difference of probability and outcome; skill: by how much it is below that
of the base rate. Calibration error: mean distance of probability and frequency over ten equal
groups of forecasts. All gaps of one moment are not independent, so ``days`` gives the skill of each
day judged.

``--worth``: a simulation with real costs of jobs that never end, without forecasts, with those by
age, and with the true ends of gaps. ``--nodes``: a random sample of so many nodes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from malletrain.sim.engine import simulate
from malletrain.sim.idle import idle_nodes
from malletrain.sim.joblogs import read_log
from malletrain.sim.model_jobs import CostModel
from malletrain.sim.settings import Foresight, SimSettings
from malletrain.sim.workload_files import read_curves
from malletrain.sim.workloads import SimJob
from scavenger.horizon import GapWatch, SurvivalEstimator
from scavenger.trace.files import read, read_names
from scavenger.trace.trace import Trace

Floats = npt.NDArray[np.float64]
DAY_S = 86400.0
HORIZONS_S = (60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 14400.0)
CONTENDERS = ("base rate", "by age")
SOURCES: tuple[Foresight, ...] = ("none", "age", "known")


def polls(trace: Trace, every_s: float) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield (time, node → time since which it was seen idle) as polls of the machine show it,
    seconds.
    """
    since: dict[str, float] = {}
    idle = np.zeros(len(trace.names), dtype=bool)
    done = 0
    for now in np.arange(0.0, trace.duration_s, every_s).tolist():
        stop = int(np.searchsorted(trace.time, now, side="right"))
        changed = trace.node[done:stop].tolist()
        # A node that was busy in between is in another gap, as the scheduler's log shows.
        for node, becomes in zip(changed, trace.idle[done:stop].tolist(), strict=True):
            idle[node] = becomes
            since.pop(trace.names[node], None)
        for node in dict.fromkeys(changed):
            if idle[node]:
                since[trace.names[node]] = now
        done = stop
        yield now, since


def ends_of(trace: Trace) -> dict[str, tuple[list[float], list[float]]]:
    """Return node → beginnings of its gaps, and their ends; infinite if the trace does not show the
    end.
    """
    gaps = trace.gaps()
    results: dict[str, tuple[list[float], list[float]]] = {}
    for node, begin, end in zip(gaps.node.tolist(), gaps.start, gaps.end, strict=True):
        begins, ends = results.setdefault(trace.names[node], ([], []))
        begins.append(float(begin))
        ends.append(float(end) if end < trace.duration_s else np.inf)
    return results


def judge(trace: Trace, train_s: float, poll_s: float, every_s: float) -> list[dict[str, Any]]:
    """Return scores of all contenders over the time after ``train_s``, one row per horizon."""
    horizons = np.array(HORIZONS_S)
    ends = ends_of(trace)
    watch = GapWatch(SurvivalEstimator())
    base: list[Floats] = []
    by_age: list[Floats] = []
    outcomes: list[Floats] = []
    days: list[Floats] = []
    due = every_s
    for now, since in polls(trace, poll_s):
        watch.update(since, now)
        if now < due or not since:
            continue
        due = now + every_s
        nodes = sorted(since)
        remaining_s = np.array([_end(ends[n], now) for n in nodes]) - now
        outcome = np.where(
            horizons[None] <= trace.duration_s - now, remaining_s[:, None] > horizons[None], np.nan
        )
        if now < train_s:
            base.append(outcome)
            continue
        outcomes.append(outcome)
        days.append(np.full(len(nodes), now // DAY_S))
        curve = {
            s: [watch.estimator.survival(h, now - s) for h in HORIZONS_S]
            for s in set(since.values())
        }
        by_age.append(np.array([curve[since[n]] for n in nodes]))
    if not outcomes or not base:
        raise SystemExit("The trace is too short: nothing is left to learn from, or to judge.")
    truth, day = np.concatenate(outcomes), np.concatenate(days)
    rates = np.nanmean(np.concatenate(base), axis=0)
    forecasts = {
        "base rate": np.broadcast_to(rates, truth.shape),
        "by age": np.concatenate(by_age),
    }
    rows = []
    for k, horizon in enumerate(HORIZONS_S):
        observed = ~np.isnan(truth[:, k])
        y, on_day = truth[observed, k], day[observed]
        row: dict[str, Any] = {"horizon_s": horizon, "forecasts": len(y), "lasted": y.mean()}
        reference = (forecasts["base rate"][observed, k] - y) ** 2
        for name in CONTENDERS:
            p = forecasts[name][observed, k]
            error = (p - y) ** 2
            row[name] = {
                "brier": float(error.mean()),
                "skill": float(1 - error.mean() / reference.mean()),
                "days": [
                    float(1 - error[on_day == d].mean() / reference[on_day == d].mean())
                    for d in np.unique(on_day)
                ],
                "calibration_error": _calibration_error(p, y),
            }
        rows.append(row)
    return rows


def _end(gaps: tuple[list[float], list[float]], now: float) -> float:
    begins, ends = gaps
    k = int(np.searchsorted(begins, now, side="right")) - 1
    return ends[k]


def _calibration_error(p: Floats, y: Floats) -> float:
    """Return the mean difference of forecast and observed frequency over ten groups of equal
    size.
    """
    groups = np.array_split(np.argsort(p, kind="stable"), 10)
    return float(sum(len(g) * abs(p[g].mean() - y[g].mean()) for g in groups if len(g)) / len(p))


def tell(rows: list[dict[str, Any]]) -> list[str]:
    """Return the Markdown table: Brier score, its improvement over the base rate (on each judged
    day), and the calibration error.
    """
    lines = ["| idle still after | fraction | base rate | by age |", "|---|---|---|---|"]
    for row in rows:
        cells = []
        for name in CONTENDERS:
            one = row[name]
            days = ", ".join(f"{100 * s:+.0f}" for s in one["days"])
            cell = f"{one['brier']:.4f}"
            if name != "base rate":
                cell += f", {100 * one['skill']:+.1f} % ({days})"
            cells.append(f"{cell}; off {100 * one['calibration_error']:.1f} %")
        cells = [f"{row['horizon_s'] / 60:g} min", f"{100 * row['lasted']:.1f} %", *cells]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def worth(
    trace: Trace, curves: Path, count: int, max_size: int, snapshot_s: float
) -> list[dict[str, Any]]:
    """Return results of a simulation with each source of forecasts; times in per cent of the idle
    node-seconds.
    """
    shapes = list(read_curves(curves).values())
    jobs = [
        SimJob(f"j{k:02}", 1, max_size, 1e18, curve, stated_curve=curve)
        for k, curve in ((k, shapes[k % len(shapes)]) for k in range(count))
    ]
    rows: list[dict[str, Any]] = []
    samples_without = math.nan
    for source in SOURCES:
        costs = CostModel(snapshot_s=snapshot_s)
        result = simulate(trace, jobs, SimSettings(costs=costs, foresight=source))
        samples_without = samples_without if rows else result.samples
        pauses = result.start_fraction + result.rescale_fraction + result.preemption_fraction
        rows.append(
            {
                "forecasts": source,
                "samples": result.samples,
                "gain_percent": 100 * (result.samples / samples_without - 1),
                "pauses_percent": 100 * pauses,
                "snapshots_percent": 100 * result.snapshot_fraction,
                "repeated_percent": 100 * result.redone_fraction,
                "preemptions": result.preemptions,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path)
    source.add_argument("--log", type=Path)
    parser.add_argument("--node-list", type=Path)
    parser.add_argument("--from-day", type=float, default=0.0, metavar="DAY")
    parser.add_argument("--days", type=float, default=14.0)
    parser.add_argument("--train", type=float, default=8.0, metavar="DAYS")
    parser.add_argument("--poll", type=float, default=60.0, metavar="S")
    parser.add_argument("--every", type=float, default=300.0, metavar="S")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worth", type=Path, metavar="CURVES")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--max-size", type=int, default=32)
    parser.add_argument("--snapshot-cost", type=float, default=0.2, metavar="S")
    args = parser.parse_args()
    if args.log:
        trace = idle_nodes(read_log(args.log)).trace
    else:
        trace = read(args.trace, names=read_names(args.node_list) if args.node_list else None)
    begin = args.from_day * DAY_S
    trace = trace.window(begin, min(trace.duration_s, begin + args.days * DAY_S))
    if args.nodes:
        trace = trace.sample(args.nodes)
    if args.worth:
        for row in worth(trace, args.worth, args.jobs, args.max_size, args.snapshot_cost):
            print(json.dumps(row), flush=True)
        return
    rows = judge(trace, args.train * DAY_S, args.poll, args.every)
    print(json.dumps(rows) if args.json else "\n".join(tell(rows)))


if __name__ == "__main__":
    main()
