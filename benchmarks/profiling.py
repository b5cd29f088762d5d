"""Measures the cost of learning a scaling curve, and the value of the curve: the inverse order
against its alternatives.

    python -m benchmarks.profiling --curves dnn_scaling_summit.csv --seeds 10 --json profiling.json

Each job trains on a virtual clock while it is profiled: a rescale up takes 17-19 s, down 11-13 s,
in which nothing is processed; the product's own meter measures a size from noisy step times. Jobs
are analytic laws on 1..6 and 1..16 nodes and, with ``--curves FILE`` (columns model, nodes,
samples_per_s), measured models on 1..(largest) nodes, interpolated linearly between the sizes of
the table.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from allocator import Goal, RescaleCost, ScalingCurve, make_bid
from benchmarks.profiling_methods import METHODS, Method
from jpa import MeasureConfig, MeasurementState, ThroughputMeter
from tests.allocator.oracles.dp import solve

STEPS_PER_S = 5.0
VISIT_STD = 0.01
WITHIN = 0.05
RUN_S = 600.0

Law = Callable[[int], float]


@dataclass(frozen=True)
class Truth:
    """One job: its true throughput (samples/s) on 1..largest nodes."""

    name: str
    family: str
    largest: int
    law: Law


@dataclass(frozen=True)
class Profile:
    """Costs and errors of one profile. Errors are the largest relative error over all sizes
    1..largest.

    ``lost_share``: samples that a run of ten minutes does not process because of the profile and
    the way back to the largest size, as a share of those of an unprofiled run at the largest size.
    ``within_*``: time until the error was first within 5 %, None for never.
    """

    visits: int
    scale_ups: int
    scale_downs: int
    seconds: float
    node_seconds: float
    lost_share: float
    error: float
    within_s: float | None
    within_node_s: float | None


@dataclass(frozen=True)
class Setting:
    """``noise``: relative scatter of a step's duration. ``up_s``, ``down_s``: from-to seconds of a
    rescale.
    """

    noise: float = 0.05
    up_s: tuple[float, float] = (17.0, 19.0)
    down_s: tuple[float, float] = (11.0, 13.0)


def analytic(largest: int) -> list[Truth]:
    """Return laws on 1..largest nodes: both ways of scaling, a plateau, a peak, and a step that no
    smooth law contains.
    """
    knee, peak, switch = round(0.6 * largest), round(0.7 * largest), largest // 2
    laws: dict[str, Law] = {
        "linear": lambda k: 100.0 * k,
        "fixed batch, 2 % communication": lambda k: 100 / (1 / k + 0.02 * (k - 1) / k),
        "fixed batch, 10 %": lambda k: 100 / (1 / k + 0.1 * (k - 1) / k),
        "fixed batch, 40 %": lambda k: 100 / (1 / k + 0.4 * (k - 1) / k),
        "batch per node, ring": lambda k: 100 * k / (1 + 0.3 * (k - 1) / k),
        "batch per node, tree": lambda k: 100 * k / (1 + 0.08 * math.log2(k)),
        "plateau": lambda k: 100.0 * min(k, knee),
        "peak": lambda k: 100 / (1 / k + k / peak**2),
        "second switch": lambda k: 100 * k / (1 + 0.01 * k + (0.25 if k > switch else 0)),
    }
    return [Truth(name, f"analytic, 1-{largest}", largest, law) for name, law in laws.items()]


def measured(path: Path) -> list[Truth]:
    """Return the table of measured curves. Raises SystemExit with a sentence if it cannot be
    read.
    """
    table: dict[str, dict[int, float]] = defaultdict(dict)
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                table[row["model"]][int(row["nodes"])] = float(row["samples_per_s"])
    except (OSError, KeyError, ValueError) as error:
        raise SystemExit(
            f"The curves in {path} cannot be read ({error!r}); it needs columns model, nodes "
            "and samples_per_s."
        ) from error
    curves = {name: ScalingCurve.of(points) for name, points in table.items()}
    return [
        Truth(name, f"{path.stem}, 1-{c.largest}", c.largest, c.at) for name, c in curves.items()
    ]


def run_profile(truth: Truth, method: Method, rng: random.Random, setting: Setting) -> Profile:
    """Profile one job without prior: move it as the method requests, and measure it at every
    stop.
    """
    now = samples = node_seconds = 0.0
    size, ups, downs, visits = 0, 0, 0, 0
    within: tuple[float, float] | None = None
    error = math.inf
    while (next_size := method.next()) is not None:
        up = next_size > size
        ups, downs, visits = ups + up, downs + (not up), visits + 1
        cost = rng.uniform(*(setting.up_s if up else setting.down_s))
        now, node_seconds, size = now + cost, node_seconds + cost * next_size, next_size
        meter, seconds, done = measure(
            truth.law(size) * math.exp(rng.gauss(0, VISIT_STD)), size, rng, setting.noise
        )
        now, node_seconds, samples = now + seconds, node_seconds + seconds * size, samples + done
        method.learn(meter.measurement(seconds))
        error = max(abs(method.believes(k) / truth.law(k) - 1) for k in range(1, truth.largest + 1))
        if error <= WITHIN and within is None:
            within = (now, node_seconds)
    best, start = truth.law(truth.largest), statistics.fmean(setting.up_s)
    back = 0.0 if size == truth.largest else start
    profiled = samples + best * max(0.0, RUN_S - now - back)
    unprofiled = best * max(RUN_S - start, 1.0)
    lost = 1 - profiled / unprofiled
    return Profile(
        visits,
        ups,
        downs,
        now,
        node_seconds,
        lost,
        error,
        within[0] if within else None,
        within[1] if within else None,
    )


def measure(
    rate: float, nodes: int, rng: random.Random, noise: float
) -> tuple[ThroughputMeter, float, float]:
    """Run the job at one size until the meter is satisfied. Return the meter, the seconds and the
    samples processed.
    """
    meter = ThroughputMeter(nodes, 0.0, MeasureConfig())
    now = samples = wave = 0.0
    outcome = MeasurementState.MEASURING
    while outcome is MeasurementState.MEASURING:
        # step times vary partly from step to step, partly in slower waves
        wave = 0.7 * wave + math.sqrt(1 - 0.7**2) * rng.gauss(0, 1)
        now += max(0.05, 1 + noise * (0.7 * rng.gauss(0, 1) + 0.7 * wave)) / STEPS_PER_S
        samples += rate / STEPS_PER_S
        outcome = meter.feed(now, samples)
    return meter, now, samples


def regret(jobs: Sequence[Truth], beliefs: Sequence[Method], nodes: int) -> float:
    """Return the relative loss of equivalent single-node throughput when ``nodes`` nodes are
    allocated by the estimated curves.
    """

    def allocate(curves: Sequence[ScalingCurve]) -> list[int]:
        free = RescaleCost(0, 0, 0)
        bids = [
            make_bid(str(i), curve, max_nodes=job.largest, goal=Goal.EFFICIENCY, cost=free)
            for i, (job, curve) in enumerate(zip(jobs, curves, strict=True))
        ]
        allocation = solve(bids, {"default": nodes})
        return [allocation.size(bid.job) for bid in bids]

    def worth(sizes: Sequence[int]) -> float:
        return sum(job.law(k) / job.law(1) for job, k in zip(jobs, sizes, strict=True) if k > 0)

    def curve_of(job: Truth, law: Law) -> ScalingCurve:
        return ScalingCurve.of((k, max(0.0, law(k))) for k in range(1, job.largest + 1))

    believed = [curve_of(job, method.believes) for job, method in zip(jobs, beliefs, strict=True)]
    return 1 - worth(allocate(believed)) / worth(allocate([curve_of(job, job.law) for job in jobs]))


def compare(
    jobs: Sequence[Truth], methods: Sequence[str], seeds: int, setting: Setting
) -> dict[str, dict[str, list[float | None]]]:
    """Return every figure of every method over all jobs and seeds (regret: over seeds and two sizes
    of machine). All jobs are of one family.
    """
    results: dict[str, dict[str, list[float | None]]] = {
        name: defaultdict(list) for name in methods
    }
    largest = max(job.largest for job in jobs)
    for name in methods:
        for seed in range(seeds):
            beliefs = []
            for job in jobs:
                # Every method sees the same jobs; the noise depends on seed and job alone.
                method = METHODS[name](job.largest, random.Random(f"{seed} {job.name} method"))
                profile = run_profile(job, method, random.Random(f"{seed} {job.name}"), setting)
                for key, value in asdict(profile).items():
                    results[name][key].append(value)
                beliefs.append(method)
            for nodes in (largest, 2 * largest):
                results[name]["regret"].append(regret(jobs, beliefs, nodes))
    return results


def summary(values: Sequence[float | None]) -> dict[str, float | None]:
    """Return mean, median, 10th and 90th percentile; never (None) sorts last and makes a percentile
    None. ``reached``: share of values that are not None.
    """
    ordered = sorted(math.inf if v is None else v for v in values)
    finite = [v for v in ordered if math.isfinite(v)]

    def percentile(share: float) -> float | None:
        value = ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]
        return value if math.isfinite(value) else None

    return {
        "mean": statistics.fmean(finite) if len(finite) == len(ordered) else None,
        "median": percentile(0.5),
        "p10": percentile(0.1),
        "p90": percentile(0.9),
        "reached": len(finite) / len(ordered),
    }


# heading, figure, statistic, format
COLUMNS: tuple[tuple[str, str, str, str], ...] = (
    ("visits", "visits", "mean", "{:.1f}"),
    ("ups", "scale_ups", "mean", "{:.1f}"),
    ("downs", "scale_downs", "mean", "{:.1f}"),
    ("seconds", "seconds", "median", "{:.0f}"),
    ("p10", "seconds", "p10", "{:.0f}"),
    ("p90", "seconds", "p90", "{:.0f}"),
    ("node-s", "node_seconds", "median", "{:.0f}"),
    ("lost %", "lost_share", "median", "{:.1%}"),
    ("p90", "lost_share", "p90", "{:.1%}"),
    ("error", "error", "median", "{:.1%}"),
    ("p90", "error", "p90", "{:.1%}"),
    ("in 5 %", "within_s", "reached", "{:.0%}"),
    ("after s", "within_s", "median", "{:.0f}"),
    ("node-s", "within_node_s", "median", "{:.0f}"),
    ("regret", "regret", "mean", "{:.2%}"),
    ("p90", "regret", "p90", "{:.2%}"),
)


def table(summaries: dict[str, dict[str, dict[str, float | None]]]) -> str:
    """Return one line per method."""
    rows = [["method", *(heading for heading, *_ in COLUMNS)]]
    for name, figures in summaries.items():
        cells = [figures[figure][statistic] for _, figure, statistic, _ in COLUMNS]
        rows.append(
            [
                name,
                *(
                    "never" if v is None else c[3].format(v)
                    for v, c in zip(cells, COLUMNS, strict=True)
                ),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        row[0].ljust(widths[0])
        + "".join("  " + cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison; the table goes to standard output, everything to ``--json``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--curves", type=Path, help="CSV with columns model, nodes, samples_per_s")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--noise",
        type=float,
        default=0.05,
        help="relative scatter of a step's duration (default 0.05)",
    )
    parser.add_argument(
        "--up",
        type=float,
        nargs=2,
        default=(17.0, 19.0),
        metavar="S",
        help="seconds to scale up, from and to",
    )
    parser.add_argument(
        "--down",
        type=float,
        nargs=2,
        default=(11.0, 13.0),
        metavar="S",
        help="seconds to scale down, from and to",
    )
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=list(METHODS))
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.noise < 0:
        parser.error("--seeds must be 1 or more and --noise 0 or more.")
    setting = Setting(
        options.noise, (options.up[0], options.up[1]), (options.down[0], options.down[1])
    )
    jobs = analytic(6) + analytic(16) + (measured(options.curves) if options.curves else [])
    report: dict[str, object] = {"seeds": options.seeds, **asdict(setting)}
    families: dict[str, object] = {}
    for family in dict.fromkeys(job.family for job in jobs):
        members = [job for job in jobs if job.family == family]
        results = compare(members, options.methods, options.seeds, setting)
        summaries = {
            name: {key: summary(values) for key, values in figures.items()}
            for name, figures in results.items()
        }
        families[family] = {
            "jobs": [job.name for job in members],
            "summary": summaries,
            "raw": results,
        }
        sys.stdout.write(
            f"\n{family} nodes, {len(members)} jobs, {options.seeds} seeds\n{table(summaries)}\n"
        )
        sys.stdout.flush()
    report["families"] = families
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
