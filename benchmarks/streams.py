"""What it costs to find out how fast jobs are, where jobs end and make room for the next, and where
they last.

    python -m benchmarks.streams --trace week1.csv.gz --node-list nodes.txt --curves scaling.csv
    --table nasbench101_sample30k.csv.gz --cells nas,60,0 sweep,20,3 … [--processes 2] [--json FILE]

A cell is a kind of jobs, the hour of the trace at which it begins, and the seed that draws nodes
and jobs. Kinds: ``nas``, ``hpo`` (streams of architecture and of hyperparameter search),
``sweep`` (the trials of :mod:`benchmarks.sweep_simulated`, in the seed's own order), ``longnas``
and ``longhpo`` (the same ten jobs all the time). Each cell is simulated for ``--hours`` on
``--nodes`` nodes, without turns for starving jobs, under

* ``freetrain``: FreeTrain, told the true curves;
* ``told``: the product, told the true curves;
* ``revealed``: the product, told the true curve of a job when it first runs. No way of finding out
  that has to run a job first can be expected to do better;
* ``always``: the product, every job profiled;
* ``worth``: the product, profiles where they are worth their cost;
* ``sized``: the same, and owners say beforehand how large their models are (``--model-size``),
  which else workers say when they run. Here the speed follows from the size by one law, which
  flatters it.

Two numbers per way and kind, means over its cells: samples over FreeTrain's, with the standard
error, and the share of what the jobs of each moment could do. In a stream the first flatters plans
that leave slow jobs waiting; the second does not, but compares each way with its own jobs.

The cells of docs/profiling.md are sweep,10,21 sweep,75,22 sweep,120,23 sweep,140,24 sweep,50,25
sweep,100,26 nas,10,31 nas,75,32 nas,120,33 nas,140,34 nas,45,35 nas,95,36 hpo,36,41 hpo,84,42
hpo,108,43 hpo,12,44 longhpo,36,45 longhpo,84,46 longhpo,108,47 longnas,36,48 longnas,84,49
longnas,108,50. Its other cells begin at hours 30 to 130, with seeds 171 to 175 (sweeps) and 181 to
186 (architecture search). A profile of the smallest size before all else costs one more rescale per
job: -5.7 % in sweeps, -3.9 % in architecture search.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import Point, World, play
from benchmarks.sweep_simulated import trials, write
from malletrain.sim.nas import NAS_SAMPLES

KINDS = ("nas", "hpo", "sweep", "longnas", "longhpo")
NEVER = float("inf")
WAYS = {
    "freetrain": Point("freetrain", "", policy="freetrain", starvation=NEVER),
    "told": Point("told", "", policy="malletrain", starvation=NEVER),
    "revealed": Point(
        "revealed",
        "",
        policy="profiled",
        states="none",
        revealed=True,
        starvation=NEVER,
    ),
    "always": Point(
        "always", "", policy="profiled", states="none", when_worth=False, starvation=NEVER
    ),
    "worth": Point("worth", "", policy="profiled", states="none", starvation=NEVER),
    "sized": Point("sized", "", policy="profiled", states="none", sized=True, starvation=NEVER),
}
TRIALS = 500


@dataclass(frozen=True)
class Cell:
    """One draw: the kind of jobs, the first hour, and the seed."""

    kind: str
    begin_h: float
    seed: int


def cell(text: str) -> Cell:
    """Parse ``kind,hour,seed``."""
    kind, hour, seed = text.split(",")
    if kind not in KINDS:
        raise argparse.ArgumentTypeError(f"kinds are {', '.join(KINDS)}, not {kind}")
    return Cell(kind, float(hour), int(seed))


def simulated(made: tuple[World, Point]) -> dict[str, Any]:
    """Simulate one cell in one way."""
    result = play(*made)
    columns = ("samples", "fraction_of_ideal", "jobs_completed", "rescales", "profiles")
    return {name: result[name] for name in columns}


def rows(
    cells: Sequence[Cell], results: dict[tuple[Cell, str], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Return a row for each kind and way."""
    for kind in dict.fromkeys(c.kind for c in cells):
        mine = [c for c in cells if c.kind == kind]
        for way in WAYS:
            over = [
                results[c, way]["samples"] / results[c, "freetrain"]["samples"] - 1.0 for c in mine
            ]
            error = statistics.stdev(over) / len(over) ** 0.5 if len(over) > 1 else 0.0
            yield {
                "kind": kind,
                "way": way,
                "cells": len(mine),
                "over_freetrain": statistics.fmean(over),
                "standard_error": error,
                "of_the_moment": statistics.fmean(
                    results[c, way]["fraction_of_ideal"] for c in mine
                ),
                **{
                    name: sum(results[c, way][name] for c in mine)
                    for name in ("jobs_completed", "rescales", "profiles")
                },
            }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", required=True)
    parser.add_argument("--node-list")
    parser.add_argument("--curves", help="of hpo; default: built-in models")
    parser.add_argument("--table", type=Path, help="NAS-Bench-101's sample, for sweep")
    parser.add_argument("--cells", type=cell, nargs="+", required=True, metavar="KIND,HOUR,SEED")
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.table is None and any(c.kind == "sweep" for c in args.cells):
        parser.error("--table is needed for a sweep's trials.")
    with tempfile.TemporaryDirectory() as folder:
        sweep = Path(folder) / "sweep.json"
        if args.table:
            write(sweep, trials(args.table, TRIALS, 0, NAS_SAMPLES))
        keys = [(c, way) for c in args.cells for way in WAYS]
        todo = [_made(c, way, args, sweep) for c, way in keys]
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(args.processes, mp_context=context) as pool:
            results = dict(zip(keys, pool.map(simulated, todo), strict=True))
    table = list(rows(args.cells, results))
    print("| jobs | way | samples over FreeTrain's | of the moment | ended | rescales | profiles |")
    print("|---|---|---|---|---|---|---|")
    for row in table:
        print(
            f"| {row['kind']} ({row['cells']}) | {row['way']} | "
            f"{100 * row['over_freetrain']:+.1f} % ± {100 * row['standard_error']:.1f} | "
            f"{row['of_the_moment']:.3f} | {row['jobs_completed']} | {row['rescales']} | "
            f"{row['profiles']} |"
        )
    if args.json:
        each = [{**vars(c), "way": way, **results[c, way]} for c, way in keys]
        args.json.write_text(json.dumps({"rows": table, "cells": each}, indent=1) + "\n", "utf-8")


def _made(c: Cell, way: str, args: argparse.Namespace, sweep: Path) -> tuple[World, Point]:
    jobs = str(sweep) if c.kind == "sweep" else None
    world = World(args.trace, args.node_list, args.curves, args.nodes, c.begin_h, args.hours, jobs)
    changed = {
        "seed": c.seed,
        "workload": "nas" if c.kind.endswith("nas") else "hpo",
        "length": "long" if c.kind.startswith("long") else "stream",
    }
    return world, Point(**{**vars(WAYS[way]), **changed})


if __name__ == "__main__":
    main()
