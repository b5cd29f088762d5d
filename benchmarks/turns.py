"""What turns of waiting jobs cost, and what they buy.

    python -m benchmarks.turns --trace week1.csv.gz --node-list nodes.txt --curves scaling.csv
    --cells nas,60,0 hpo,60,1 … [--turns-apart 12] [--processes 2] [--json FILE]
    python -m benchmarks.turns --trace KTH-SP2-1996.swf.gz --curves scaling.csv --cells nas,1440,0

A job that waits for its first nodes for ``--starvation`` seconds gets its minimum for as long
again, one that had nodes before after ``--turns-apart`` times as many (``[jobs]``). Each cell, see
:mod:`benchmarks.streams`, is simulated with turns and without them, on the same nodes with the same
jobs, whose true curves are told: nothing but turns differs. ``--trace`` may be a log of jobs, whose
machine's idle nodes are meant then.

Per kind of jobs, means over its cells: samples with turns over samples without, with the standard
error; the same of *work*, which counts single-node seconds, so that a sample of a slow model counts
as much as many of a quick one; for how long a job with a place was without nodes, hours: the
longest, and what 95 % of the jobs stay under, with turns and without; idle node-time on which
samples were processed, and in which jobs started or were rescaled, with turns less without.

The cells of docs/allocation.md are nas, hpo and longhpo with hours and seeds 12,61 60,62 140,63 on
Summit's trace and 1200,71 3360,72 5640,73 on KTH's log. On other draws ``--turns-apart`` 1, 6 and
12 cost 1.9, 1.1 and 0.2 % of samples on Summit and 3.7, 1.2 and 0.8 % on KTH; the longest waits are
1.9, 2.2 and 3.4 h, and 0.8, 1.3 and 2.4 h.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.figures import Point, World, simulation
from benchmarks.streams import Cell, cell
from malletrain.core import defaults
from malletrain.core.settings import ControllerSettings

KEPT = (
    "samples",
    "harvested_fraction",
    "start_fraction",
    "rescale_fraction",
    "longest_wait_hours",
    "p95_wait_hours",
    "starts",
    "rescales",
    "jobs_completed",
)


def simulated(made: tuple[World, Point]) -> dict[str, Any]:
    """Simulate one cell in one way."""
    run = simulation(*made)
    result = run.run().to_dict()
    work = math.fsum(each.done / each.job.curve.at(1) for each in run.runs.values())
    return {**{name: result[name] for name in KEPT}, "work": work}


def rows(
    cells: Sequence[Cell], results: dict[tuple[Cell, bool], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Return a row for each kind: a cell with turns (True) and without."""
    for kind in dict.fromkeys(c.kind for c in cells):
        mine = [c for c in cells if c.kind == kind]

        def ratio(name: str, of: Sequence[Cell] = mine) -> tuple[float, float]:
            each = [results[c, True][name] / results[c, False][name] - 1.0 for c in of]
            error = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else 0.0
            return statistics.fmean(each), error

        def more(name: str, of: Sequence[Cell] = mine) -> float:
            return statistics.fmean(results[c, True][name] - results[c, False][name] for c in of)

        def both(name: str, of: Sequence[Cell] = mine) -> list[float]:
            return [statistics.fmean(results[c, way][name] for c in of) for way in (True, False)]

        yield {
            "kind": kind,
            "cells": len(mine),
            "samples": ratio("samples"),
            "work": ratio("work"),
            "longest": [max(results[c, way]["longest_wait_hours"] for c in mine)
                        for way in (True, False)],
            "p95": both("p95_wait_hours"),
            "starts": both("starts"),
            "rescales": both("rescales"),
            "completed": both("jobs_completed"),
            "harvested": more("harvested_fraction"),
            "starting": more("start_fraction"),
            "rescaling": more("rescale_fraction"),
        }  # fmt: skip


def tell(table: Sequence[dict[str, Any]]) -> list[str]:
    """Return the Markdown table."""
    lines = [
        "| jobs | samples | work | longest wait | 95 % wait | trained on | starting | rescaling "
        "| starts | rescales | ended |",
        "|---" * 11 + "|",
    ]
    for row in table:
        cells = [f"{row['kind']} ({row['cells']})"]
        cells += [f"{100 * m:+.1f} % ± {100 * e:.1f}" for m, e in (row["samples"], row["work"])]
        cells += ["{:.1f}, {:.1f} h".format(*row[name]) for name in ("longest", "p95")]
        cells += [f"{100 * row[n]:+.2f} %" for n in ("harvested", "starting", "rescaling")]
        cells += ["{:,.0f}, {:,.0f}".format(*row[n]) for n in ("starts", "rescales", "completed")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", required=True)
    parser.add_argument("--node-list")
    parser.add_argument("--curves", help="of hpo; default: built-in models")
    parser.add_argument("--cells", type=cell, nargs="+", required=True, metavar="KIND,HOUR,SEED")
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--starvation", type=float, default=defaults.STARVATION_S, metavar="S")
    parser.add_argument(
        "--turns-apart", type=float, default=ControllerSettings.turns_apart, metavar="TIMES"
    )
    parser.add_argument("--policy", default="malletrain", help="'profiled': curves are not told")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if any(c.kind == "sweep" for c in args.cells):
        parser.error("A sweep waits as one job; give other kinds.")
    keys = [(c, turns) for c in args.cells for turns in (True, False)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=context) as pool:
        results = pool.map(simulated, [_made(c, turns, args) for c, turns in keys])
        results_by_cell = dict(zip(keys, results, strict=True))
    table = list(rows(args.cells, results_by_cell))
    print("\n".join(tell(table)))
    if args.json:
        each = [{**vars(c), "turns": turns, **results_by_cell[c, turns]} for c, turns in keys]
        args.json.write_text(json.dumps({"rows": table, "cells": each}, indent=1) + "\n", "utf-8")


def _made(c: Cell, turns: bool, args: argparse.Namespace) -> tuple[World, Point]:
    world = World(args.trace, args.node_list, args.curves, args.nodes, c.begin_h, args.hours)
    point = Point(
        "",
        "",
        seed=c.seed,
        workload="nas" if c.kind.endswith("nas") else "hpo",
        length="long" if c.kind.startswith("long") else "stream",
        states="none" if args.policy == "profiled" else "exact",
        policy=args.policy,
        starvation=args.starvation if turns else math.inf,
        turns_apart=args.turns_apart,
    )
    return world, point


if __name__ == "__main__":
    main()
