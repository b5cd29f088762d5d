"""WindSR beside bicubic interpolation, SRCNN and ESRGAN; observations brought in with several
radii; training on changing nodes.

    python -m benchmarks.windsr --preset cpu --out FOLDER [--data FILE] [--only tables,trace]

Three parts. (1) PSNR and SSIM on held-out days of every method over several seeds, as table 6.2 of
the WindSR paper. (2) MAE and RMSE after sparse observations were brought in, with impact radii of
2, 4, 6 pixels and the dynamic one, as table 6.3. Observations are true values at random pixels;
errors are taken at all other pixels. T1 and T2 are chosen on the training days. (3) One of the
trainings of part 1 again as a job of MalleTrain on the embedded cluster, whose nodes come and go by
a trace: its scores beside those of the undisturbed seeds.

What is finished is kept in FOLDER and not done again. Without --data the fields are synthetic.
Needs ``jobscripts/windsr``, which is found beside this folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.windsr_observations import assimilation
from benchmarks.windsr_scores import score, unit
from benchmarks.windsr_setting import HOME, PLANS, ROWS, Setting
from benchmarks.windsr_tables import tables


def on_trace(setting: Setting, live: bool, trace_file: Path | None) -> dict[str, Any]:
    """The training of WindSR with terrain and seed 0 as a job on nodes that come and go; scored
    like the others.
    """
    from windsr import checkpoint

    from benchmarks.windsr_trace import train_on_trace

    folder = setting.out / f"trace-{'live' if live else 'restart'}"
    kept = folder / "scores.json"
    if kept.exists():
        return json.loads(kept.read_text())
    plan = setting.plan
    arguments = [
        "train",
        str(folder / "run"),
        "--preset",
        plan.preset,
        "--steps",
        str(plan.steps["windsr"]),
        "--seed",
        "0",
    ]
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
        "steps": facts["steps"],
        "wall_s": time.time() - began,
        "load": os.getloadavg()[0],
        **lived,
    }
    row |= score(made, setting.fields()[1], plan.members, 0)
    kept.write_text(json.dumps(row, indent=1))
    return row


def _attempt(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    return work(*arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is not done yet and print the tables; everything goes to FOLDER/windsr.json too."""
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
        "--only", default="tables,trace", help="tables, trace, or both with a comma"
    )
    parser.add_argument("--seeds", type=int, help="default: the preset's")
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
        replace(chosen, seeds=options.seeds or chosen.seeds),
        options.out.resolve(),
        options.data and options.data.resolve(),
    )
    plan = setting.plan
    setting.out.mkdir(parents=True, exist_ok=True)
    began, load = time.time(), os.getloadavg()
    rows: list[dict[str, Any]] = []
    observed: list[dict[str, Any]] = []
    if "tables" in options.only:
        # Seed by seed, so that a run cut short has whole tables of fewer seeds; bicubic has no
        # seed.
        todo = [(m, t, s) for s in range(plan.seeds) for m, t in ROWS if m != "bicubic" or s == 0]
        with ProcessPoolExecutor(
            options.processes or plan.processes, multiprocessing.get_context("spawn")
        ) as pool:
            made = {pool.submit(_attempt, unit, setting, *what): what for what in todo}
            for done in as_completed(made):
                row = done.result()
                rows.append(row)
                print(
                    f"{time.time() - began:.0f} s: {made[done]} {row['psnr']:.2f} dB",
                    file=sys.stderr,
                    flush=True,
                )
            observed = list(
                pool.map(
                    _attempt, [assimilation] * plan.seeds, [setting] * plan.seeds, range(plan.seeds)
                )
            )
    tabled = time.time() - began
    traced = (
        [
            on_trace(setting, live, options.trace)
            for live in (m == "live" for m in options.modes.split(","))
        ]
        if "trace" in options.only
        else []
    )
    result = {
        "plan": asdict(plan),
        "data": str(options.data and options.data.name),
        "tables_s": tabled,
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
