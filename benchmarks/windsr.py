"""WindSR beside bicubic interpolation, SRCNN, ESRGAN, its own U-Net as a regression, and a
diffusion of what that lacks; observations brought in by several ways and radii; training on
changing nodes.

    python -m benchmarks.windsr --preset cpu --out FOLDER [--data FILE] [--only methods,trace]

Parts: *methods* trains every method with each day left out once and scores it on whole fields of
that day (PSNR, SSIM, RMSE, CRPS, spread, ranks, power, tails). *assimilation* brings stations that
measure an analysis into forecasts of the same time. *pictures* draws one such day with and without
the stations. *trace* does one of the trainings again as a job of MalleTrain on the embedded
cluster, whose nodes come and go by a trace.

Preset ``short`` is ``cpu`` with a sixth of the steps, half the batch, one seed and fewer fields.
What is finished is kept in FOLDER and not done again. Without --data fields are synthetic. Needs
``jobscripts/windsr``, which is found beside this folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.windsr_observations import analyses, assimilation
from benchmarks.windsr_scores import score, unit
from benchmarks.windsr_setting import HOME, PLANS, Setting
from benchmarks.windsr_tables import tables


def on_trace(setting: Setting, live: bool, trace_file: Path | None) -> dict[str, Any]:
    """The training of WindSR with terrain and seed 0 as a job on nodes that come and go; scored
    like the others.
    """
    from windsr import checkpoint

    from benchmarks.windsr_trace import train_on_trace

    folder = setting.out / f"trace-{'live' if live else 'restart'}"
    path = folder / "scores.json"
    if path.exists():
        return json.loads(path.read_text())
    plan, day = setting.plan, setting.days()[-1]
    arguments = [
        "train",
        str(folder / "run"),
        "--preset",
        plan.preset,
        "--steps",
        str(plan.steps),
        "--seed",
        "0",
        "--test-day",
        day,
    ]
    if plan.batch:
        arguments += ["--batch", str(plan.batch)]
    arguments += ["--snapshot-every", "10"]
    arguments += (
        ["--data", str(setting.data)]
        if setting.data
        else ["--synthetic-size", "64" if plan.preset == "tiny" else "200"]
    )
    began = time.time()
    lived = train_on_trace(
        folder, HOME / "job.py", arguments, plan.trace_nodes, plan.trace_s, live, trace_file
    )
    made, facts = checkpoint.load(folder / "run" / "model.safetensors")
    row = {
        "mode": "live" if live else "restart",
        "day": day,
        "steps": facts["steps"],
        "wall_s": time.time() - began,
        "load": os.getloadavg()[0],
        **lived,
    }
    row |= score(made, setting, day, 0)
    path.write_text(json.dumps(row, indent=1))
    return row


def methods_of(setting: Setting, day: str, seed: int) -> list[dict[str, Any]]:
    """Return all rows of one fold and seed, in order, because windsr-edm builds on unet."""
    return [unit(setting, name, day, seed) for name in setting.plan.rows]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is not done yet, and print the tables. Everything is also written to
    FOLDER/windsr.json.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PLANS, default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--data",
        type=Path,
        help="fine fields with terrain, such as ../shared/data/wind_mogreps_uk/*.nc",
    )
    parser.add_argument(
        "--only",
        default="methods,assimilation,pictures,trace",
        help="which parts, with commas between them",
    )
    parser.add_argument("--seeds", type=int, help="default: the preset's")
    parser.add_argument("--days", help="left out one by one, with commas; default: every day")
    parser.add_argument("--rows", help="methods, with commas; default: the preset's")
    parser.add_argument("--modes", default="live,restart", help="of the training on the trace")
    parser.add_argument(
        "--processes", type=int, help="trainings at the same time; default: the preset's"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        help="a trace of nodes to replay; default: a synthetic one with Summit's lengths of gaps",
    )
    options = parser.parse_args(arguments)
    chosen = PLANS[options.preset]
    setting = Setting(
        replace(
            chosen,
            seeds=options.seeds or chosen.seeds,
            days=tuple(options.days.split(",")) if options.days else (),
            rows=tuple(options.rows.split(",")) if options.rows else chosen.rows,
        ),
        options.out.resolve(),
        options.data and options.data.resolve(),
    )
    plan, parts = setting.plan, options.only.split(",")
    setting.out.mkdir(parents=True, exist_ok=True)
    began, load = time.time(), os.getloadavg()
    rows: list[dict[str, Any]] = []
    observed: list[dict[str, Any]] = []

    def note(what: str) -> None:
        print(f"{time.time() - began:.0f} s: {what}", file=sys.stderr, flush=True)

    with ProcessPoolExecutor(
        options.processes or plan.processes, multiprocessing.get_context("spawn")
    ) as pool:
        if "methods" in parts:
            # seed by seed, so that an interrupted run has complete tables of fewer seeds
            todo = [(day, seed) for seed in range(plan.seeds) for day in setting.days()]
            made = {pool.submit(methods_of, setting, *what): what for what in todo}
            for done in as_completed(made):
                rows += done.result()
                note(f"methods without {made[done]}")
        if "assimilation" in parts:
            todo = [
                (day, seed)
                for seed in range(plan.seeds)
                for day in analyses(setting)
                if day in setting.days()
            ]
            brought = {pool.submit(assimilation, setting, *what): what for what in todo}
            for each in as_completed(brought):
                observed.append(each.result())
                note(f"assimilation of {brought[each]}")
    if "pictures" in parts:
        from benchmarks.windsr_pictures import pictures

        for path in pictures(setting):
            note(f"wrote {path}")
    traced = (
        [
            on_trace(setting, live, options.trace)
            for live in (m == "live" for m in options.modes.split(","))
        ]
        if "trace" in parts
        else []
    )
    rows.sort(key=lambda row: (row["seed"], row["day"]))
    observed.sort(key=lambda one: (one["seed"], one["day"]))
    result = {
        "plan": asdict(plan),
        "data": str(options.data and options.data.name),
        "wall_s": time.time() - began,
        "load_before": load,
        "load_after": os.getloadavg(),
        "rows": rows,
        "assimilation": observed,
        "trace": traced,
    }
    (setting.out / "windsr.json").write_text(json.dumps(result, indent=1))
    print(tables(rows, observed, traced))
    print(
        f"\n{result['wall_s']:.0f} s in all, load {load[0]:.1f} before and "
        f"{os.getloadavg()[0]:.1f} after"
    )


if __name__ == "__main__":
    main()
